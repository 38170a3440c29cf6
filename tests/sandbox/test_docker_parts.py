"""The parts of the Docker backend that need no engine: how many starts at once, the engine's answers as
errors, the base image made of this machine."""

from __future__ import annotations

import asyncio
import io
import tarfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import SandboxError, TaskError
from agentrl.types import SandboxSpec
from envs.sandbox import rootfs
from envs.sandbox.contract import Mount
from envs.sandbox.docker import DockerBackend
from envs.sandbox.engine import Engine, EngineRefused, EngineUnknown, socket_path
from envs.sandbox.images import Images, folder_digest
from envs.sandbox.pressure import Deadline, Limit, Pressure, not_ready


def test_slowness_halves_the_limit_once_and_health_brings_it_back() -> None:
    limit = Limit(8)
    for _ in range(8):
        limit.learn(0.3)
    assert limit.limit == 8
    limit.learn(3.0)
    assert limit.limit == 4
    limit.learn(3.0)  # It was under way when the limit fell: no news.
    assert (limit.limit, limit.decreased) == (4, 1)
    for _ in range(40):
        limit.learn(0.3)
    assert limit.limit == 8


def test_what_is_quick_for_a_person_is_never_slow_however_quick_it_was_before() -> None:
    limit = Limit(8)
    limit.learn(0.001)
    limit.learn(0.4)  # 400 times the quickest
    assert limit.limit == 8
    limit.learn(0.6)
    assert limit.limit == 4


def test_only_what_the_environment_did_moves_a_limit() -> None:
    def after(error: BaseException | None) -> float:
        limit = Limit(8)
        with suppress(type(error) if error else OSError), limit.measured():
            if error is not None:
                raise error
        return limit.limit

    assert after(None) == 8
    assert after(SandboxError("The registry refuses.")) == 4
    assert after(OSError()) == 4
    assert after(TaskError("The Dockerfile is wrong.")) == 8
    assert after(asyncio.CancelledError()) == 8


@settings(max_examples=60, deadline=None)
@given(
    maximum=st.integers(1, 4),
    work=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["good", "bad", "cancelled"]), st.booleans()),
        max_size=16,
    ),
)
def test_never_more_than_the_maximum_and_every_slot_comes_back(
    maximum: int, work: list[tuple[int, str, bool]]
) -> None:
    async def one(pressure: Pressure, inside: list[bool], turns: int, end: str, alone: bool) -> None:
        async with pressure.slot(alone=alone):
            inside.append(alone)
            try:
                for _ in range(turns + 1):
                    assert len(inside) <= pressure.in_flight <= maximum
                    assert len(inside) == 1 or not any(inside)
                    await asyncio.sleep(0)
            finally:
                inside.remove(alone)
            if end == "bad":
                raise OSError

    async def check() -> None:
        pressure = Pressure(maximum)
        inside: list[bool] = []
        tasks = [asyncio.create_task(one(pressure, inside, *each)) for each in work]
        await asyncio.sleep(0)
        for task, (_, end, _) in zip(tasks, work, strict=True):
            if end == "cancelled":
                task.cancel()
                await asyncio.sleep(0)
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert not any(isinstance(outcome, AssertionError) for outcome in done)
        assert pressure.in_flight == 0
        assert pressure.peak <= maximum
        async with asyncio.timeout(5), pressure.slot():
            assert pressure.in_flight == 1

    asyncio.run(check())


def test_a_deadline_stands_still_while_its_owner_waits_for_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(pressure: Pressure, own_s: float, work_s: float) -> str:
        deadline = Deadline(own_s)
        try:
            async with deadline, deadline.turn(pressure):
                assert deadline.left() <= own_s
                if work_s:
                    await asyncio.sleep(work_s)
        except TimeoutError:
            return "never came" if deadline.queued else "late"
        return "done"

    async def check() -> None:
        pressure = Pressure(1)
        starts = [start(pressure, 60.0, 0.5), start(pressure, 0.2, 0.0), start(pressure, 0.2, 60.0)]
        assert await asyncio.gather(*starts) == ["done", "done", "late"]
        monkeypatch.setattr("envs.sandbox.pressure.QUEUE_DEADLINE_S", 0.1)
        async with pressure.slot():
            assert await start(pressure, 60.0, 0.0) == "never came"
        assert pressure.in_flight == 0
        assert await start(pressure, 60.0, 0.0) == "done"

    asyncio.run(check())


def test_a_start_that_took_too_long_says_what_it_waited_for_and_what_to_do() -> None:
    error = not_ready(
        "a", 120.0, phase="pull", place="cluster", more=", or add nodes", evidence={"log": "no room"}
    )
    assert error.message == "Sandbox a was not ready within 120 s: waiting for 'pull'."
    assert error.fix == "The cluster is overloaded: start fewer sandboxes at once, or add nodes."
    assert (error.code, error.phase, error.owner) == ("start_timeout", "pull", "environment")
    assert (error.retryable, error.evidence) == (True, {"log": "no room"})


def test_a_wait_that_is_cancelled_in_the_moment_that_a_turn_comes_is_only_cancelled() -> None:
    async def wait(pressure: Pressure) -> None:
        async with pressure.slot():
            raise AssertionError("it was cancelled before its turn")

    async def check() -> None:
        pressure = Pressure(1)
        async with pressure.slot():
            waiting = [asyncio.create_task(wait(pressure)) for _ in range(3)]
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
        # The holder left before those who wait could see that they were cancelled.
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in outcomes] == [asyncio.CancelledError] * 3
        assert (pressure.in_flight, pressure.waiting) == (0, 0)

    asyncio.run(check())


def test_whoever_wants_to_be_alone_is_not_passed_over() -> None:
    async def check() -> None:
        pressure, order = Pressure(4), []

        async def one(name: str, alone: bool) -> None:
            async with pressure.slot(alone=alone):
                order.append(name)
                await asyncio.sleep(0)

        async with pressure.slot():
            tasks = [asyncio.create_task(one(name, name == "alone")) for name in ("first", "alone", "b", "c")]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert (order, pressure.waiting) == (["first"], 3)
            tasks[1].cancel()
            await asyncio.sleep(0)
            assert (await asyncio.gather(*tasks, return_exceptions=True))[0] is None
        assert order == ["first", "b", "c"], "whoever gives up holds nobody"

    asyncio.run(check())


def test_time_in_somebody_elses_queue_is_not_the_deadlines_but_has_an_end() -> None:
    """Half an hour of it in all: worked out by hand, with nothing that waits."""

    async def check() -> None:
        async with Deadline(60.0) as deadline:
            for seconds, left_s in ((1000.0, 1060.0), (1000.0, 1060.0), (800.0, 1860.0), (1.0, 1860.0)):
                deadline.postpone(seconds)
                assert left_s - 10.0 < deadline.left() <= left_s

    asyncio.run(check())


def test_a_folder_that_is_written_while_it_is_read_is_known_by_what_was_copied(tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "app.py").write_bytes(b"a")
    over = threading.Event()

    def scribble() -> None:
        while not over.is_set():
            for letter in (b"a", b"b"):
                (folder / "app.py").write_bytes(letter * 300_000)
                over.wait(0.002)

    async def check() -> None:
        for number in range(30):
            images = Images(tmp_path / f"images-{number}", None)
            assert images.path(await images.prepare(str(folder))).is_dir()

    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        asyncio.run(check())
    finally:
        over.set()
        writer.join()
    copies = list(tmp_path.glob("images-*/*"))
    assert [path.name for path in copies] == [folder_digest(path).replace(":", "-") for path in copies]


@asynccontextmanager
async def answering(folder: Path, answer: bytes | None) -> AsyncIterator[Engine]:
    """An engine that says this to everything and hangs up; None: says nothing for ever."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()  # Until the asker gives up.
        else:
            writer.write(answer)
        writer.close()

    path = str(folder / "e.sock")
    server = await asyncio.start_unix_server(serve, path)
    try:
        yield Engine(path)
    finally:
        server.close()
        await asyncio.sleep(0.05)  # The other end of a given-up connection hears of it.


JSON = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (None, "engine_timeout"),
        (b"", "engine_cut"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", "engine_cut"),
        (b"not http at all\r\n\r\n", "engine_cut"),
        (JSON % (b"200 OK", 5, b"{half"), "engine_garbled"),
    ],
)
def test_an_answer_that_can_not_be_used_is_unknown_and_never_a_success(
    tmp_path: Path, answer: bytes | None, code: str
) -> None:
    async def check() -> None:
        async with answering(tmp_path, answer) as engine:
            with pytest.raises(EngineUnknown) as caught:
                await engine.call("POST", "/containers/create", phase="create", deadline_s=0.5)
            assert (caught.value.code, caught.value.phase, caught.value.owner) == (
                code,
                "create",
                "environment",
            )

    asyncio.run(check())


def test_a_refusal_carries_the_engines_words_and_status(tmp_path: Path) -> None:
    words = b'{"message":"no such thing"}'

    async def check() -> None:
        async with answering(tmp_path, JSON % (b"404 Not Found", len(words), words)) as engine:
            with pytest.raises(EngineRefused, match="no such thing") as caught:
                await engine.call("GET", "/images/x/json", phase="prepare", deadline_s=5)
            assert caught.value.status == 404
            assert await engine.image("x", phase="prepare") is None
            assert await engine.remove("x", deadline_s=5) == "absent"

    asyncio.run(check())


def test_an_engine_that_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="No Docker engine answers") as caught:
        DockerBackend(tmp_path, host=f"unix://{tmp_path}/none.sock").check()
    assert caught.value.fix is not None
    assert "DOCKER_HOST" in caught.value.fix


@pytest.mark.parametrize("host", ["tcp://10.0.0.1:2375", "ssh://somewhere"])
def test_an_engine_on_another_machine_is_refused(host: str) -> None:
    with pytest.raises(SandboxError) as caught:
        socket_path(host)
    assert (caught.value.code, caught.value.retryable) == ("engine_remote", False)


@pytest.mark.parametrize(
    ("spec", "mounts", "code"),
    [
        (SandboxSpec(image="dir:x", network="public"), (), "network_unsupported"),
        (SandboxSpec(image="dir:x", workdir="/usr/src"), (), "bad_path"),
        (SandboxSpec(image="dir:x", workdir="app"), (), "bad_path"),
        (SandboxSpec(image="dir:x"), (Mount(source="/tmp", target="/a/../etc"),), "bad_path"),
    ],
)
def test_what_a_container_can_not_be_is_refused_before_the_engine_is_asked(
    tmp_path: Path, spec: SandboxSpec, mounts: tuple[Mount, ...], code: str
) -> None:
    backend = DockerBackend(tmp_path, host=f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxError) as caught:
        asyncio.run(backend.create(spec, image="dir:x", session="s", mounts=mounts))
    assert (caught.value.code, caught.value.retryable) == (code, False)


def test_the_base_image_holds_a_system_and_nothing_of_this_machines_owner() -> None:
    out = io.BytesIO()
    rootfs.write_rootfs(out)
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        members = {member.name: member for member in tar.getmembers()}
    names = set(members)
    assert {"etc/passwd", "app", "proc", "usr/local/bin/python3", "tmp"} <= names
    assert any(name.endswith("bin/bash") for name in names)
    assert any(name.endswith("/encodings/utf_8.py") for name in names)
    assert not any("site-packages" in name or "__pycache__" in name for name in names)
    assert not any(name.startswith("home/") and name != "home/policy" for name in names)
    assert all((member.uid, member.gid) == (0, 0) for member in members.values())
    assert {name for name in names if name.startswith("etc/")} <= {
        *("etc/passwd", "etc/group", "etc/nsswitch.conf", "etc/profile", "etc/shells", "etc/ld.so.cache"),
        *(name for name in names if name.startswith("etc/alternatives")),
    }
    assert rootfs.identity() == rootfs.identity()
