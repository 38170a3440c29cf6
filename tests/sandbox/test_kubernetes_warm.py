"""Pods that are started before anyone asks: given away by one PATCH, never too many, nobody's but one's. On a
cluster of this process, whose watch tells late; and once on a real one."""

# ruff: noqa: ASYNC110  (waiting for what another task does is what these tests do)

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import clusters
import pytest
from listed import wanted

from agentrl.errors import SandboxError
from agentrl.types import SandboxSpec
from envs.sandbox import kubernetes, warm
from envs.sandbox.conformance import sh
from envs.sandbox.contract import Mount
from envs.sandbox.kubernetes import KubernetesBackend
from envs.sandbox.kubernetes_api import ApiRefused, ApiUnknown
from envs.sandbox.kubernetes_pod import Placement, manifest
from envs.sandbox.live import LiveSandbox

Json = dict[str, Any]


def refused(status: int, reason: str) -> ApiRefused:
    return ApiRefused("no", status=status, reason=reason, phase="x", pause_s=None)


@dataclass(eq=False)
class Heard:
    """One pod's agent and witness, as far as a pool asks them."""

    name: str
    alive: bool = True
    connected: bool = False
    silent_s: float = 10**9
    renewed: int = 0
    deaf: bool = False

    async def call(self, header: Json, body: bytes = b"", *, deadline_s: float) -> tuple[Json, bytes]:
        if self.deaf:
            raise SandboxError("it does not answer")
        return {"instance": f"i-{self.name}", "oom_kills": 0, "disk_free_bytes": 1, "processes": 0}, b""

    def post(self, header: Json, body: bytes = b"") -> None: ...

    async def renew(self) -> None:
        self.renewed += 1

    def close(self) -> None:
        self.alive = False

    async def over(self) -> bool:
        return True


@dataclass
class Fake:
    """An API server whose one node starts what fits, and whose watch tells everything `lag_s` late."""

    lag_s: float = 0.0
    room: int = 100
    inside: bool = False
    default_namespace: str = "space"
    pods: dict[str, Json] = field(default_factory=dict)
    log: list[tuple[float, Json]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    lose: int = 0
    """So many answers to a PATCH are lost after it was done."""
    most: int = 0
    _versions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def connect(self) -> None: ...

    async def close(self) -> None: ...

    async def insist(self, method: str, path: str, **more: Any) -> Json:
        more.pop("try_s", None)
        return await self.call(method, path, **more)

    def _told(self, kind: str, pod: Json) -> None:
        pod["metadata"]["resourceVersion"] = str(next(self._versions))
        event = json.loads(json.dumps({"type": kind, "object": pod}))
        self.log.append((asyncio.get_running_loop().time(), event))

    def _schedule(self) -> None:
        running = sum("podIP" in pod["status"] for pod in self.pods.values())
        for pod in self.pods.values():
            if "podIP" in pod["status"]:
                continue
            if running < self.room:
                running += 1
                both = [
                    {"name": name, "imageID": "id", "state": {"running": {}}}
                    for name in ("sandbox", "witness")
                ]
                pod["status"] = {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": both}
                pod["spec"]["nodeName"] = "node"
            else:
                why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                pod["status"] = {"phase": "Pending", "conditions": [{**why, "message": "no room"}]}
            self._told("MODIFIED", pod)

    async def call(
        self, method: str, path: str, *, body: Json | None = None, params: Any = None, **_: Any
    ) -> Json:
        await asyncio.sleep(0)
        self.asked.append(f"{method} {path.rpartition('space/')[2] or path}")
        kind, _, name = path.partition("/pods")
        name = name.strip("/")
        if kind == path:  # not of pods: nodes, versions, what pods belong to
            made = {"name": "owner", "uid": "1"} if body else {}
            return {"items": [], "metadata": made, "major": "1", "minor": "30"}
        if method == "POST":
            pod = json.loads(json.dumps(body))
            pod["metadata"]["uid"] = f"u-{pod['metadata']['name']}"
            pod["status"] = {"phase": "Pending"}
            self.pods[pod["metadata"]["name"]] = pod
            self.most = max(self.most, sum(self.waits(pod) for pod in self.pods.values()))
            self._told("ADDED", pod)
            answer = json.loads(json.dumps(pod))
            asyncio.get_running_loop().call_soon(self._schedule)
            return answer
        if method == "GET" and not name:
            items = json.loads(json.dumps(list(self.pods.values())))
            return {"items": items, "metadata": {"resourceVersion": str(next(self._versions))}}
        if name not in self.pods:
            raise refused(404, "NotFound")
        pod = self.pods[name]
        if method == "PATCH":
            assert body is not None
            if body["metadata"].pop("uid") != pod["metadata"]["uid"]:
                raise refused(409, "Conflict")
            for key, values in body["metadata"].items():
                pod["metadata"][key] |= values
            self._told("MODIFIED", pod)
            if self.lose:
                self.lose -= 1
                raise ApiUnknown("cut", code="api_cut", phase="x")
        if method == "DELETE":
            del self.pods[name]
            self._told("DELETED", pod)
            self._schedule()
        return json.loads(json.dumps(pod))

    async def watch(self, *_: Any, version: str, **__: Any) -> AsyncIterator[Json]:
        at = 0
        while True:
            while at < len(self.log) and self.log[at][0] + self.lag_s <= asyncio.get_running_loop().time():
                at += 1
                if int(self.log[at - 1][1]["object"]["metadata"]["resourceVersion"]) > int(version):
                    yield self.log[at - 1][1]
            await asyncio.sleep(0.005)

    @staticmethod
    def waits(pod: Json) -> bool:
        return bool(pod["metadata"]["annotations"]["agentrl/session"] == "")

    def named(self, *sessions: str) -> list[str]:
        """Names of the pods that are the sessions', as the cluster has it."""
        by = {pod["metadata"]["annotations"]["agentrl/session"]: name for name, pod in self.pods.items()}
        return [by[session] for session in sessions]


class Faked(KubernetesBackend):
    """On a cluster that is none, with pods that are none."""

    def __init__(self, state: Path, fake: Fake, **options: Any) -> None:
        super().__init__(state, placement=Placement(priority="agentrl"), base_image="base:1", **options)
        self._cluster = fake  # type: ignore[assignment]
        self.lines: dict[str, Heard] = {}

    def _line(self, pod: Json, token: str) -> Any:
        name = pod["metadata"]["name"]
        return self.lines.setdefault(name, Heard(name))


@asynccontextmanager
async def opened(state: Path, fake: Fake, size: int = 2, **options: Any) -> AsyncIterator[tuple[Faked, str]]:
    folder = state / "environment"
    folder.mkdir(exist_ok=True)
    (folder / "app.py").write_text("print('hello')\n")
    backend = Faked(state, fake, **options)
    backend.keep_warm(size)
    try:
        yield backend, await backend.prepare(str(folder))
    finally:
        await backend.close()
    assert backend.leaked == 0
    assert fake.pods == {}


async def make(backend: KubernetesBackend, image: str, session: str, **more: Any) -> LiveSandbox:
    spec = SandboxSpec(image=image, memory_mib=64, disk_mib=16, pids=48)
    return await backend.create(spec, image=image, session=session, deadline_s=60.0, **more)


async def filled(backend: KubernetesBackend, ready: int) -> None:
    async with asyncio.timeout(60):
        while backend.pool is None or (backend.pool.ready, backend.pool.making) != (ready, 0):
            await asyncio.sleep(0.01)


def test_one_that_waited_is_given_away_by_one_request_and_no_watch_is_waited_for(tmp_path: Path) -> None:
    async def check() -> None:
        fake = Fake()
        async with opened(tmp_path, fake) as (backend, image):
            cold = await make(backend, image, "one")
            await filled(backend, 1)
            (waiting,) = fake.named("")
            assert fake.pods[waiting]["spec"]["priorityClassName"] == "agentrl-warm"
            fake.lag_s, begun = 3600.0, len(fake.asked)
            given = await asyncio.wait_for(make(backend, image, "run/two"), 2.0)
            requests = [line for line in fake.asked[begun:] if waiting in line]
            assert requests == [f"PATCH pods/{waiting}"]
            assert (cold.info.warm, given.info.warm, given.info.id) == (False, True, waiting)
            assert fake.named("run/two") == [waiting]
            assert fake.pods[waiting]["metadata"]["labels"]["agentrl.session"].startswith("run_two.")
            fake.lag_s = 0.0
            assert backend.pool is not None
            assert (backend.pool.hits, backend.pool.misses) == (1, 1)
            (tmp_path / "tests").mkdir()
            mounted = await make(
                backend, image, "v", mounts=(Mount(source=str(tmp_path / "tests"), target="/tests"),)
            )
            assert not mounted.info.warm
            assert fake.pods[mounted.info.id]["spec"]["priorityClassName"] == "agentrl-verifier"

    asyncio.run(check())


def test_with_a_watch_that_tells_everything_late_the_pool_never_exceeds_its_size(tmp_path: Path) -> None:
    async def check() -> None:
        fake = Fake(lag_s=0.4)
        async with opened(tmp_path, fake) as (backend, image):
            held = [await make(backend, image, "0")]
            for number in range(1, 8):
                held.append(await make(backend, image, str(number)))
                assert backend.pool is not None
                assert backend.pool.ready + backend.pool.making <= 2
            await filled(backend, 2)
            assert 1 <= fake.most <= 2
            assert len({box.info.id for box in held}) == 8
            assert sum(box.info.warm for box in held) == backend.pool.hits  # type: ignore[union-attr]
            assert len(fake.pods) == 10

    asyncio.run(check())


@pytest.mark.parametrize("how", ["deaf", "deleted behind our back", "the answer is lost", "died"])
def test_one_that_can_not_be_given_away_is_ended_and_another_is_made(tmp_path: Path, how: str) -> None:
    async def check() -> None:
        fake = Fake()
        async with opened(tmp_path, fake, size=1) as (backend, image):
            held = [await make(backend, image, "one")]
            await filled(backend, 1)
            (waiting,) = fake.named("")
            match how:
                case "deaf":
                    backend.lines[waiting].deaf = True
                case "deleted behind our back":
                    del fake.pods[waiting]
                case "the answer is lost":
                    fake.lose = 1
                case _:
                    backend.lines[waiting].alive = False
            held.append(await make(backend, image, "two"))
            assert held[1].info.id != waiting
            assert fake.named("two") == [held[1].info.id]
            await filled(backend, 1)
            assert waiting not in fake.pods
            assert backend.pool is not None
            assert backend.pool.discarded == 1
            (left,) = fake.named("")
            assert left != waiting

    asyncio.run(check())


def test_those_that_wait_give_way_when_no_node_has_room_for_one_that_somebody_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "WAY_S", 0.2)

    async def check() -> None:
        fake = Fake(room=3)
        async with opened(tmp_path, fake, size=1) as (backend, image):
            await make(backend, image, "one")
            await filled(backend, 1)
            assert (await make(backend, image, "two")).info.warm
            await filled(backend, 1)
            (tmp_path / "tests").mkdir()
            mount = Mount(source=str(tmp_path / "tests"), target="/tests")
            verifier = await asyncio.wait_for(make(backend, image, "v", mounts=(mount,)), 10.0)
            assert not verifier.info.warm
            assert backend.pool is not None
            assert backend.pool.discarded >= 1
            assert set(fake.named("one", "two", "v")) <= set(fake.pods)
            await verifier.close()

    asyncio.run(check())


def test_one_that_waits_is_told_that_its_backend_lives_and_who_comes_after_ends_it(tmp_path: Path) -> None:
    async def check() -> None:
        fake = Fake()
        before = Faked(tmp_path, fake, lease_s=0.3)
        before.outlive("owner")
        before.keep_warm(1)
        (tmp_path / "environment").mkdir()
        image = await before.prepare(str(tmp_path / "environment"))
        await make(before, image, "held")
        await filled(before, 1)
        (waiting,) = fake.named("")
        async with asyncio.timeout(10):
            while not before.lines[waiting].renewed:
                await asyncio.sleep(0.01)
        for task in (*before._tasks, before._pool._filler):  # type: ignore[union-attr]
            task.cancel()  # type: ignore[union-attr]
        await before.pods.close()
        after = Faked(tmp_path, fake)
        after.outlive("owner")
        try:
            assert await after.adopt("") is None, "nobody's is nobody's to adopt"
            found = await after.adopt("held")
            assert found is not None
            assert await after.forget() == 1
            async with asyncio.timeout(10):
                while waiting in fake.pods:
                    await asyncio.sleep(0.01)
        finally:
            await after.close()
        assert fake.pods == {}

    asyncio.run(check())


def test_what_waits_has_the_lowest_class_and_whoever_gives_it_away_may_patch_pods() -> None:
    placement = Placement(priority="agentrl")
    made = {
        kind: manifest(wanted(placement=placement, **how))["spec"]["priorityClassName"]
        for kind, how in (
            ("warm", {"waits": True, "mounts": ()}),
            ("live", {"mounts": ()}),
            ("verifier", {}),
        )
    }
    assert made == {"warm": "agentrl-warm", "live": "agentrl-live", "verifier": "agentrl-verifier"}
    assert "patch" in {kind: verbs for kind, _, verbs in kubernetes._RIGHTS}["pods"]


@pytest.mark.kubernetes
def test_on_a_cluster_whose_watch_tells_late_one_that_waited_is_given_away_at_once(tmp_path: Path) -> None:
    async def check(space: str, proxy: clusters.ApiProxy) -> None:
        backend = KubernetesBackend(tmp_path, placement=Placement(namespace=space), server=proxy.url)
        backend.keep_warm(1)
        try:
            (tmp_path / "environment").mkdir()
            (tmp_path / "environment" / "app.py").write_text("print('hello')\n")
            image = await backend.prepare(str(tmp_path / "environment"))
            cold = await make(backend, image, "one")
            await filled(backend, 1)
            await cold.close()
            proxy.lag_s, begun = 5.0, time.monotonic()
            given = await make(backend, image, "two")
            took_s = time.monotonic() - begun
            assert (cold.info.warm, given.info.warm) == (False, True)
            assert took_s < 5.0, "no news of the watch was waited for"
            assert proxy.count("PATCH /api/v1/namespaces/") == 1
            assert (await sh(given, "cat app.py")).stdout.head == b"print('hello')\n"
            said = await asyncio.to_thread(clusters.pod_json, space, given.info.id)
            assert said["metadata"]["annotations"]["agentrl/session"] == "two"
            until = time.monotonic() + 60
            while backend.pool is None or backend.pool.ready < 1:
                there = set(await asyncio.to_thread(clusters.pods_in, space))
                there -= {f"pod/{box.info.id}" for box in (cold, given)}
                assert len(there) <= 1, "never more than its size, though it hears late of each"
                assert time.monotonic() < until
                await asyncio.sleep(0.3)
        finally:
            proxy.lag_s = 0.0
            await backend.close()
        assert backend.leaked == 0
        assert await asyncio.to_thread(clusters.pods_in, space) == []

    async def run(space: str) -> None:
        async with clusters.proxied() as proxy:
            await check(space, proxy)

    with clusters.namespace() as space:
        asyncio.run(run(space))
