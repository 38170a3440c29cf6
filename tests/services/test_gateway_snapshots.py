"""Workdirs that are kept: taken once, laid in whole, their tenant's only, and named by the evidence."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from gateway_given import MemoryBackend, MemorySandbox, World, finished, ready, task_at, tenant, until, world

from agentrl.errors import ConfigError, SandboxError
from agentrl.store import Store, codec
from agentrl.types import Evidence, EvidenceKey, SandboxSpec, Task, Verdict
from envs import grading
from envs.evidence import ORIGIN, Witness
from envs.sandbox.adoption import Memory
from envs.sandbox.conformance import CHANGES
from envs.sandbox.contract import FileChange
from envs.sandbox.diff import DiffTooLarge, diff_hash
from envs.sandbox.local import LocalBackend
from envs.tasks import package
from harness.gateway import client as calls
from harness.gateway import wire
from services.gateway.snapshots import pack


async def kept(here: World, task: Task, key: str = "first", **more: Any) -> wire.SnapshotView:
    """A snapshot of a session with one file."""
    view = await ready(here, task, f"for {key}".replace(" ", "-"))
    await here.ada.send(calls.put_file(view.id, "a/b.bin", b"\0\xff" * 9))
    return await here.ada.send(calls.snapshot(view.id, client_key=key, **more))


def started(verdict: Verdict) -> Evidence:
    return next(link for link in verdict.evidence if link.key is EvidenceKey.E1_START)


def test_a_session_begins_from_a_snapshot_and_its_verdict_says_from_which(
    store: Store, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its diff is the whole one, and no grader is told that its steps are all that was done."""
    steps: list[Any] = []
    grade = grading.grade

    async def seen(*words: Any, **more: Any) -> Verdict:
        steps.append(more["steps"])
        return await grade(*words, **more)

    monkeypatch.setattr(grading, "grade", seen)

    async def run() -> None:
        async with world(store, [task]) as here:
            snapshot = await kept(here, task)
            assert (snapshot.changes, snapshot.processes, snapshot.task.id) == (1, 1, task.id)
            view = await ready(here, task, from_snapshot=snapshot.id)
            assert (view.state, view.from_snapshot) == ("ready", snapshot.id)
            assert await here.ada.send(calls.get_file(view.id, "a/b.bin")) == b"\0\xff" * 9
            await here.ada.send(calls.put_file(view.id, "more", b"more"))
            assert [c.path for c in (await here.ada.send(calls.diff(view.id))).changes] == ["a/b.bin", "more"]
            second = await here.ada.send(calls.snapshot(view.id, client_key="second"))
            assert (second.changes, second.session_id) == (2, view.id)
            assert second.digest != snapshot.digest
            verdict = await here.ada.send(finished(view.id))
            assert verdict.reward == 1.0, verdict.fault
            assert started(verdict).facts["snapshot"] == snapshot.digest
            first = await here.ada.send(finished(snapshot.session_id))
            assert "snapshot" not in started(first).facts
            assert steps == [None, ()]

    asyncio.run(run())


def test_under_one_key_there_is_one_snapshot_also_after_the_session_and_the_gateway_are_over(
    store: Store, task: Task
) -> None:
    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)
            asked = calls.snapshot(view.id, client_key="s")
            made = await asyncio.gather(*(here.ada.send(asked) for _ in range(5)))
            assert len({each.id for each in made}) == 1
            with pytest.raises(SandboxError, match="used for another snapshot") as other:
                await here.ada.send(calls.snapshot(view.id, client_key="s", ttl_s=9.0))
            assert other.value.code == "client_key_reused"
            elsewhere = await ready(here, task, "other")
            with pytest.raises(SandboxError, match="used for another snapshot"):
                await here.ada.send(calls.snapshot(elsewhere.id, client_key="s"))
            await here.ada.send(calls.delete(view.id))
            assert await here.ada.send(asked) == made[0]
            async with here.raw() as http:
                again = await http.post(f"/v1/sessions/{view.id}/snapshot", json={"client_key": "s"})
                assert again.status_code == 200
        async with world(store, [task]) as here:
            assert await here.ada.send(asked) == made[0]
            assert await here.ada.send(calls.snapshots()) == (made[0],)
            begun = await ready(here, task, "begun", from_snapshot=made[0].id)
            assert begun.state == "ready"
            with pytest.raises(SandboxError, match="deleted the session"):
                await here.ada.send(calls.snapshot(view.id, client_key="new"))

    asyncio.run(run())


def test_no_snapshot_is_taken_while_a_command_runs(store: Store, task: Task) -> None:
    go = asyncio.Event()

    async def before(operation: str, session: str) -> None:
        if operation == "exec":
            await go.wait()

    async def run() -> None:
        async with world(store, [task], backend=MemoryBackend(before=before)) as here:
            view = await ready(here, task)
            body = wire.ExecBody(exec_id="e", command="true")
            running = asyncio.create_task(here.ada.send(calls.run(view.id, body)))
            await until(lambda: here.backend.running == 1)
            with pytest.raises(SandboxError, match="A command runs") as busy:
                await here.ada.send(calls.snapshot(view.id, client_key="s"))
            assert (busy.value.code, busy.value.retryable) == ("busy", True)
            assert await here.ada.send(calls.snapshots()) == ()
            go.set()
            await running
            assert (await here.ada.send(calls.snapshot(view.id, client_key="s"))).changes == 0

    asyncio.run(run())


def test_what_can_not_be_kept_or_begun_from_is_refused_by_name_and_the_session_goes_on(
    store: Store, task: Task, tmp_path: Path
) -> None:
    other = task_at(tmp_path / "other", "other")
    large = False

    async def before(operation: str, session: str) -> None:
        if operation == "diff" and large:
            raise DiffTooLarge("The workdir has more than may be kept.", phase="diff")

    async def run() -> None:
        nonlocal large
        backend = MemoryBackend(before=before)
        async with world(store, [task, other], backend=backend, snapshots=1) as here:
            snapshot = await kept(here, task)
            for wanted, who, code, status in (
                ({"from_snapshot": "w-0", "task": {"id": task.id}}, "ada", "unknown_snapshot", 404),
                ({"from_snapshot": snapshot.id, "task": {"id": task.id}}, "bob", "unknown_snapshot", 404),
                ({"from_snapshot": snapshot.id, "task": {"id": other.id}}, "ada", "other_task", 409),
            ):
                async with here.raw(who) as http:
                    answer = await http.post("/v1/sessions", json={"client_key": "x", **wanted})
                told = wire.ErrorBody.model_validate(answer.json())
                assert (answer.status_code, told.code, told.owner) == (status, code, "caller")
                assert told.fix
            assert await here.bob.send(calls.snapshots()) == ()
            assert not (await here.bob.send(calls.delete_snapshot(snapshot.id))).deleted
            full = calls.snapshot(snapshot.session_id, client_key="more")
            with pytest.raises(ConfigError, match="keeps 1 snapshots"):
                await here.ada.send(full)
            assert (await here.ada.send(calls.delete_snapshot(snapshot.id))).deleted
            assert not (await here.ada.send(calls.delete_snapshot(snapshot.id))).deleted
            large = True
            with pytest.raises(ConfigError, match="more than may be kept"):
                await here.ada.send(full)
            large = False
            assert (await here.ada.send(full)).changes == 1  # the same key, once it is possible
            assert (await here.ada.send(calls.session(snapshot.session_id))).state == "ready"
            assert (await here.ada.send(finished(snapshot.session_id))).reward == 1.0

    asyncio.run(run())


def test_a_snapshot_that_is_over_before_its_session_is_made_is_no_fault_of_the_environment(
    store: Store, task: Task
) -> None:
    now = 1000.0

    async def run() -> None:
        nonlocal now
        async with world(store, [task], slots=1, clock=lambda: now) as here:
            snapshot = await kept(here, task, ttl_s=50.0)
            assert snapshot.expires_at == 1050.0
            waiting = await here.ada.send(
                calls.open_session(client_key="w", task_id=task.id, from_snapshot=snapshot.id)
            )
            now += 50.0
            with pytest.raises(SandboxError, match="it may have expired"):
                await ready(here, task, "late", from_snapshot=snapshot.id)
            await here.ada.send(calls.delete(snapshot.session_id))
            view = await here.ada.send(calls.session(waiting.id, wait_s=60))
            assert view.fault is not None
            assert (view.state, view.fault.owner, view.fault.code) == ("failed", "gateway", "snapshot_gone")
            await here.quiet()

    asyncio.run(run())


class Forgetful(MemoryBackend):
    """Lays nothing in."""

    async def create(self, spec: SandboxSpec, **more: Any) -> MemorySandbox:
        return await super().create(spec, **{**more, "apply": ()})


def test_a_workdir_that_is_not_what_was_taken_is_never_handed_out(store: Store, task: Task) -> None:
    """The stored bytes changed, or the sandbox does not begin as they say."""

    async def run(backend: MemoryBackend, key: str, code: str) -> None:
        async with world(store, [task], backend=backend) as here:
            snapshot = await kept(here, task, key)
            if code == "snapshot_damaged":
                forged = pack((FileChange(path="a/b.bin", kind="file", content=b"\0\xfe" * 9),))
                with sqlite3.connect(store.url.removeprefix("sqlite:///")) as raw:
                    raw.execute("UPDATE snapshots SET body = ?", (codec.compress(forged),))
            view = await ready(here, task, f"begin-{key}", from_snapshot=snapshot.id)
            assert view.fault is not None
            assert (view.state, view.fault.owner, view.fault.code) == ("failed", "gateway", code)
            await until(lambda: len(backend.live) == 1)  # of the session that was kept

    asyncio.run(run(MemoryBackend(), "damaged", "snapshot_damaged"))
    asyncio.run(run(Forgetful(), "forgetful", "snapshot_not_restored"))


def test_what_a_session_began_from_is_remembered_by_its_sandbox(task: Task) -> None:
    """For the process that adopts it."""

    async def run() -> None:
        changes = (FileChange(path="a", kind="file", content=b"b"),)
        box = await MemoryBackend().create(task.sandbox, image="i", session="s", apply=changes)
        notes: list[tuple[str, str]] = []

        class Outliving(MemorySandbox):
            def note(self, key: str, value: str) -> None:
                notes.append((key, value))

            def lease(self, ttl_s: float) -> None: ...

            async def recall(self) -> Memory:
                return Memory(notes=dict(notes), lease_left_s=None)

        box.__class__ = Outliving
        told = {"image": "i", "spec": task.sandbox, "session": "s"}
        witness = Witness(box, **told)
        await witness.probe("health")
        await witness.began_from(diff_hash(changes))
        witness.hand_out()
        assert notes[0] == (ORIGIN, diff_hash(changes)), "whoever finds that it was handed out finds this"
        after = Witness.resumed(box, await box.recall(), **told)  # type: ignore[attr-defined]
        assert after is not None
        assert after.evidence()[0].facts["snapshot"] == diff_hash(changes)

    asyncio.run(run())


def test_requests_without_a_snapshot_are_known_by_the_hash_that_they_always_had(
    store: Store, task: Task
) -> None:
    """A caller that asks again after an upgrade means the same session."""

    async def run() -> None:
        async with world(store, [task]) as here:
            view = await ready(here, task)
            row = store.session(view.id)
            assert "snapshot" not in row.body
            assert row.body_hash == hashlib.sha256(row.body.encode()).hexdigest()

    asyncio.run(run())


LISTING = (
    "find . -mindepth 1 ! -type p -printf '%p %y %m %l\\n' | sort;"
    ' find . -type f | sort | while read -r f; do cat "$f"; done'
)


@pytest.mark.sandbox
def test_what_a_snapshot_restores_is_the_workdir_as_it_was_after_a_restart_too(
    backend: LocalBackend, tmp_path: Path
) -> None:
    """Files, modes, symlinks, deletions, folders in place of files; a real sandbox, a second gateway."""
    package.write_task(
        tmp_path / "suite" / "one",
        config={
            "schema_version": "1.4",
            "task": {"name": "small/one"},
            "environment": {"workdir": "/app", "memory_mb": 128, "storage_mb": 16},
            "verifier": {"timeout_sec": 30},
            "metadata": {"agentrl": {"grader": "script", "exec_timeout_s": 30}},
        },
        instruction="Change things.\n",
        environment={
            **{
                "app.py": "a\n",
                "run.sh": "#!/bin/sh\necho run\n",
                "old/one.txt": "1\n",
                "old/two.txt": "2\n",
            },
            **{"pkg/__init__.py": "", "pkg/inner/a.py": "a\n", "pkg/inner/b.py": "b\n", "link": "l\n"},
        },
        tests={"test.sh": 'test "$(cat old/three.txt)" = 3; echo $((1 - $?)) > /logs/verifier/reward.txt\n'},
        solution="#!/bin/bash\nmkdir -p old; echo 3 > old/three.txt\n",
    )
    task = package.load_task(tmp_path / "suite" / "one")

    async def shell(here: World, session_id: str, exec_id: str, command: str) -> str:
        body = wire.ExecBody(exec_id=exec_id, command=command)
        done = await here.ada.send(calls.run(session_id, body))
        assert (done.exit_code, done.stderr.head) == (0, "")
        return done.stdout.head

    async def run(store: Store) -> None:
        place: Any = backend
        async with world(store, [task], backend=place) as here:
            view = await ready(here, task)
            await shell(here, view.id, "change", CHANGES)
            before = await shell(here, view.id, "list", LISTING)
            changes = (await here.ada.send(calls.diff(view.id))).changes
            snapshot = await here.ada.send(calls.snapshot(view.id, client_key="s"))
            assert (snapshot.changes, snapshot.processes) == (len(changes), 0)
        async with world(store, [task], backend=LocalBackend(tmp_path / "state")) as here:  # type: ignore[arg-type]
            view = await ready(here, task, "again", from_snapshot=snapshot.id)
            assert view.state == "ready", view.fault
            assert await shell(here, view.id, "list", LISTING) == before
            assert (await here.ada.send(calls.diff(view.id))).changes == changes
            await shell(here, view.id, "go-on", "echo more >> app.py; rm -r new pkg")
            verdict = await here.ada.send(finished(view.id))
            assert verdict.reward == 1.0, verdict.fault
            assert started(verdict).facts["snapshot"] == snapshot.digest

    with Store.open(tmp_path / "store.db") as store:
        store.add_tenant(tenant("ada"))
        store.add_tenant(tenant("bob"))
        asyncio.run(run(store))
