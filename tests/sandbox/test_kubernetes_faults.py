"""What goes wrong with clusters and pods, on a real cluster: each fault ends as its own kind with its owner,
nothing is blamed on the policy that is not its own doing, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from clusters import (
    ApiProxy,
    Rule,
    backends_in,
    container_of,
    kubectl,
    namespace,
    pod_json,
    pods_in,
    proxied,
    wait_until,
)

from agentrl.errors import SandboxError, SandboxLost
from agentrl.types import ExecStatus, SandboxSpec
from envs.sandbox import kubernetes, kubernetes_api, rootfs
from envs.sandbox.adoption import Outliving
from envs.sandbox.conformance import sh
from envs.sandbox.contract import ExecRequest
from envs.sandbox.kubernetes import KubernetesBackend
from envs.sandbox.kubernetes_pod import PORT, Placement
from envs.sandbox.live import LiveSandbox

pytestmark = pytest.mark.kubernetes

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
POST_PODS = "POST /api/v1/namespaces/"


@pytest.fixture(scope="module")
def space() -> Iterator[str]:
    with namespace() as name:
        yield name


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by this file's tests, so that the image is prepared once."""
    return tmp_path_factory.mktemp("state")


@asynccontextmanager
async def opened(
    space: str, state: Path, proxy: ApiProxy | None = None, reach: str = "exec", **options: Any
) -> AsyncIterator[KubernetesBackend]:
    """A backend that leaves nothing, whatever happened in between."""
    placement = Placement(namespace=space, reach=reach)
    server = None if proxy is None else proxy.url
    backend = KubernetesBackend(state, placement=placement, server=server, **options)
    try:
        yield backend
    finally:
        if proxy is not None:
            proxy.rules, proxy.silent = [], False
        await backend.close()
    assert backend.leaked == 0
    await asyncio.to_thread(nothing_left, space, backend.id)


Held = tuple[asyncio.Runner, KubernetesBackend, KubernetesBackend, ApiProxy]


@pytest.fixture(scope="module")
def shared(space: str, state: Path) -> Iterator[Held]:
    """Two backends that the tests of this file share, since opening and closing one takes longer than most of
    them: one with the API server as it is, one behind the proxy."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()

        async def begin() -> tuple[KubernetesBackend, KubernetesBackend, ApiProxy]:
            proxy = await stack.enter_async_context(proxied())
            well = await stack.enter_async_context(opened(space, state, idle_s=0.5))
            sick = await stack.enter_async_context(opened(space, state, proxy, watch_silence_s=3.0))
            return well, sick, proxy

        yield (runner, *runner.run(begin()))
        runner.run(stack.aclose())


@pytest.fixture
def held(shared: Held) -> Iterator[Held]:
    """As they were, whatever the test before did to the proxy."""
    yield shared
    shared[3].rules, shared[3].silent = [], False


def nothing_left(space: str, mine: str) -> None:
    assert [name for name in (*pods_in(space), *backends_in(space)) if mine in name] == []


async def image_of(backend: KubernetesBackend, state: Path) -> str:
    folder = state / "environment"
    if not folder.exists():  # Others may be reading it just now.
        folder.mkdir()
        (folder / "app.py").write_text("print('hello')\n")
    return await backend.prepare(str(folder))


async def make(
    backend: KubernetesBackend, state: Path, *, deadline_s: float = 100.0, **limits: int
) -> LiveSandbox:
    image = await image_of(backend, state)
    spec = SandboxSpec(image=image, **{"memory_mib": 64, "disk_mib": 16, "pids": 48, **limits})
    return await backend.create(spec, image=image, session="faults", deadline_s=deadline_s)


# ---------------------------------------------------------------------- ends of a pod


def test_a_pod_deleted_in_a_command_ends_it_at_once(held: Held, space: str, state: Path) -> None:
    runner, backend, _, _ = held

    async def check() -> None:
        box = await make(backend, state)
        running = asyncio.create_task(sh(box, "sleep 300", timeout_s=400))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(kubectl, "delete", "pod", box.info.id, "--wait=false", namespace=space)
        begun = time.monotonic()
        with pytest.raises(SandboxLost) as caught:
            await running
        assert time.monotonic() - begun < 5.0  # Two seconds, and what a busy machine adds.
        assert (caught.value.code, caught.value.owner) == ("pod_deleted", "environment")
        assert caught.value.evidence["pod"] == box.info.id
        for call in (box.probe(), box.read_file("app.py"), box.diff()):
            with pytest.raises(SandboxLost):
                await call

    runner.run(check())


STATUSES = {
    "own limit": (
        {
            "phase": "Failed",
            "reason": "Evicted",
            "message": 'Usage of EmptyDir volume "disk" exceeds the limit "16Mi".',
        },
        ("disk_quota", "policy", False),
    ),
    "node lost": (
        {"phase": "Unknown", "reason": "NodeLost", "message": "Node local which was running is unresponsive"},
        ("node_lost", "environment", True),
    ),
}


@pytest.mark.parametrize("name", STATUSES)
def test_what_the_cluster_says_of_an_end_decides_its_owner(
    held: Held, space: str, state: Path, name: str
) -> None:
    status, expected = STATUSES[name]

    runner, backend, _, _ = held

    async def check() -> None:
        box = await make(backend, state)
        running = asyncio.create_task(sh(box, "sleep 300", timeout_s=400))
        await asyncio.sleep(0.3)
        cluster = kubernetes_api.Cluster()
        try:
            path = f"/api/v1/namespaces/{space}/pods/{box.info.id}/status"
            await cluster.call("PATCH", path, phase="test", deadline_s=10, body={"status": status})
        finally:
            await cluster.close()
        with pytest.raises(SandboxLost) as caught:
            await asyncio.wait_for(running, 10)
        error = caught.value
        assert (error.code, error.owner, error.retryable) == expected
        assert error.evidence["reason"] == status["reason"]

    runner.run(check())


def test_an_agent_that_dies_leaves_its_witness_and_its_log(held: Held, space: str, state: Path) -> None:
    runner, backend, _, _ = held

    async def check() -> None:
        box = await make(backend, state)
        assert (await sh(box, "echo changed > app.py")).exit_code == 0
        container = await asyncio.to_thread(container_of, box)
        await asyncio.sleep(1.2)  # No connection at all is open when it dies.
        await asyncio.to_thread(subprocess.run, ["docker", "kill", container], check=True)
        with pytest.raises(SandboxLost) as caught:
            await sh(box, "true")
        assert (caught.value.code, caught.value.owner) == ("agent_died", "environment")
        assert caught.value.evidence["sandbox_exit"] == 137
        assert [(c.path, c.content) for c in await box.diff()] == [("app.py", b"changed\n")]

    runner.run(check())


def test_a_witness_that_dies_is_told_apart_and_takes_its_agent_with_it(space: str, state: Path) -> None:
    async def check() -> None:
        async with opened(space, state, reach="pod") as backend:
            box = await make(backend, state)
            running = asyncio.create_task(sh(box, "sleep 300", timeout_s=400))
            await asyncio.sleep(0.3)
            container = await asyncio.to_thread(container_of, box, "witness")
            await asyncio.to_thread(subprocess.run, ["docker", "kill", container], check=True)
            with pytest.raises(SandboxLost) as caught:
                await asyncio.wait_for(running, 20)
            assert (caught.value.code, caught.value.owner) == ("witness_died", "environment")
            assert caught.value.evidence["witness_exit"] == 137

    asyncio.run(check())


# ---------------------------------------------------------------------- pods that do not start


def test_an_image_that_can_not_be_pulled_says_what_to_do(space: str, state: Path) -> None:
    async def check() -> None:
        placement = Placement(namespace=space)
        backend = KubernetesBackend(state / "other", placement=placement, base_image="sandbox.invalid/none:1")
        try:
            with pytest.raises(SandboxError) as caught:
                await make(backend, state)
        finally:
            await backend.close()
        assert caught.value.code in ("image_pull", "image_missing")
        assert caught.value.owner == "environment"
        assert "sandbox.invalid/none:1" in caught.value.message
        assert "AGENTRL_KUBERNETES_IMAGE" in (caught.value.fix or "")

    asyncio.run(check())


def test_an_image_without_python_is_the_tasks_fault(space: str, state: Path) -> None:
    async def check() -> None:
        backend = KubernetesBackend(
            state / "bare", placement=Placement(namespace=space), base_image="pause:local"
        )
        try:
            with pytest.raises(SandboxError) as caught:
                await make(backend, state)
        finally:
            await backend.close()
        assert (caught.value.code, caught.value.owner, caught.value.retryable) == ("no_python", "task", False)

    asyncio.run(check())


def test_a_pod_that_fits_no_node_is_told_apart_from_a_slow_one(space: str, state: Path) -> None:
    async def check() -> None:
        async with opened(space, state, unschedulable_s=1.0) as backend:
            begun = time.monotonic()
            with pytest.raises(SandboxError) as caught:
                await make(backend, state, memory_mib=10_000_000)
            assert time.monotonic() - begun < 30
            assert (caught.value.code, caught.value.phase) == ("unschedulable", "schedule")
            assert caught.value.retryable
            assert "memory" in str(caught.value.evidence["why"])

    asyncio.run(check())


def test_a_create_that_is_cancelled_anywhere_leaves_nothing(held: Held, space: str, state: Path) -> None:
    runner, backend, _, _ = held

    async def check() -> None:
        for wait_s in (0.0, 0.1, 1.5):
            task = asyncio.create_task(make(backend, state))
            await asyncio.sleep(wait_s)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).close()
        assert backend.pressure.in_flight == 0

    runner.run(check())


# ---------------------------------------------------------------------- a sick API server


def test_a_create_whose_answer_is_lost_is_adopted_and_made_once(held: Held, space: str, state: Path) -> None:
    runner, _, backend, proxy = held

    async def check() -> None:
        before = set(await asyncio.to_thread(pods_in, space))
        rule = Rule("/pods HTTP", "drop_answer", times=1)
        proxy.rules = [rule]
        box = await make(backend, state)
        assert rule.hits == 1
        assert (await sh(box, "echo on")).stdout.head == b"on\n"
        assert set(await asyncio.to_thread(pods_in, space)) - before == {f"pod/{box.info.id}"}

    runner.run(check())


def test_a_busy_server_is_waited_for_as_long_as_it_asks(held: Held, space: str, state: Path) -> None:
    conflict = '{"kind":"Status","message":"the object has been modified","reason":"Conflict","code":409}'
    slow = '{"kind":"Status","message":"slow down","reason":"TooManyRequests","code":429}'

    runner, _, backend, proxy = held

    async def check() -> None:
        busy = Rule("/pods HTTP", "refuse", 1, status="429 Too Many Requests", body=slow)
        busy.headers = "Retry-After: 2\r\n"
        proxy.rules = [
            busy,
            Rule("/pods HTTP", "refuse", 1, status="409 Conflict", body=conflict),
            Rule("/pods HTTP", "refuse", 1),
            Rule("/pods HTTP", "cut", 1, seconds=0.0),
        ]
        begun = time.monotonic()
        box = await make(backend, state)
        assert time.monotonic() - begun > 2.0
        assert [rule.hits for rule in proxy.rules] == [1, 1, 1, 1]
        assert (await sh(box, "true")).exit_code == 0

    runner.run(check())


def test_a_watch_that_is_gone_or_silent_loses_no_news(held: Held, space: str, state: Path) -> None:
    gone = '{"kind":"Status","message":"too old resource version","reason":"Expired","code":410}'

    runner, _, backend, proxy = held

    async def check() -> None:
        box = await make(backend, state)
        lists = backend.pods.counts.lists
        proxy.rules = [Rule("watch=1", "refuse", 2, status="410 Gone", body=gone)]
        proxy.cut("watch=1")
        next_one = await make(backend, state)
        assert (await sh(next_one, "true")).exit_code == 0
        assert backend.pods.counts.gone == 2
        proxy.silent = True
        proxy.cut("watch=1")
        late = await make(backend, state)  # Nobody says that it runs: it is looked for.
        assert (await sh(late, "echo on")).stdout.head == b"on\n"
        running = asyncio.create_task(sh(box, "sleep 300", timeout_s=400))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(
            kubectl, "delete", "pod", box.info.id, "--grace-period=1", "--wait=false", namespace=space
        )
        with pytest.raises(SandboxLost) as caught:
            await asyncio.wait_for(running, 15)  # The end of its connection made us look.
        assert caught.value.owner == "environment"
        assert backend.pods.counts.lists >= lists + 3

    runner.run(check())


def test_a_cut_connection_loses_nothing_and_runs_nothing_twice(held: Held, space: str, state: Path) -> None:
    runner, _, backend, proxy = held

    async def check() -> None:
        box = await make(backend, state)
        command = (
            "echo x >> count; for i in 1 2 3 4 5 6; do echo $i; sleep 0.5; done; head -c 300000 /dev/zero"
        )
        running = asyncio.create_task(sh(box, command))
        for _ in range(3):
            await asyncio.sleep(0.8)
            proxy.cut("/exec")
        result = await running
        assert (result.status, result.exit_code) == (ExecStatus.EXITED, 0)
        assert result.stdout.head[:12] == b"1\n2\n3\n4\n5\n6\n"
        assert result.stdout.bytes_total == 12 + 300_000
        assert await box.read_file("count") == b"x\n"
        data = os.urandom(8 << 20)  # The disk of 16 MiB does not hold it twice.
        writing = asyncio.create_task(box.write_file("big", data))
        for _ in range(3):
            await asyncio.sleep(0.1)
            proxy.cut("/exec")
        await writing
        assert await box.read_file("big") == data

    runner.run(check())


def test_a_server_that_is_away_costs_nothing_but_time(space: str, state: Path) -> None:
    async def check() -> None:
        async with (
            proxied() as proxy,
            opened(space, state, proxy) as outside,
            opened(space, state, proxy, reach="pod") as inside,
        ):
            far, near = await asyncio.gather(make(outside, state), make(inside, state))
            running = asyncio.create_task(sh(far, "sleep 1; echo done; echo x >> count; cat count"))
            await asyncio.sleep(0.3)
            proxy.rules = [Rule("", "refuse", status="503 Service Unavailable")]
            proxy.cut()
            for _ in range(10):
                assert (await asyncio.wait_for(sh(near, "true"), 10)).exit_code == 0
            await asyncio.sleep(2.0)
            assert not running.done()
            proxy.rules = []
            assert (await running).stdout.head == b"done\nx\n"

    asyncio.run(check())


@pytest.mark.parametrize(("route", "phase"), [("/pods HTTP", "create"), ("/configmaps", "prepare")])
def test_a_route_that_never_answers_ends_as_the_environments_fault(
    space: str, state: Path, route: str, phase: str
) -> None:
    async def check() -> None:
        async with proxied() as proxy, opened(space, state, proxy) as backend:
            await image_of(backend, state)
            proxy.rules = [Rule(route, "never")]
            begun = time.monotonic()
            with pytest.raises(SandboxError) as caught:
                await make(backend, state, deadline_s=2)
            assert time.monotonic() - begun < 8
            assert (caught.value.owner, caught.value.retryable) == ("environment", True)
            assert (caught.value.phase, caught.value.code) == (phase, "start_timeout")
            proxy.rules = []

    asyncio.run(check())


def test_an_image_that_is_built_here_brings_its_workdir(space: str, state: Path) -> None:
    folder = state / "built"
    folder.mkdir()
    base = f"agentrl/base:{rootfs.identity()}"
    steps = "mkdir -p /app/deep && echo made > /app/deep/file && ln -s deep /app/d"
    (folder / "Dockerfile").write_text(f"FROM {base}\nENV COLOUR=blue\nRUN {steps}\n")

    async def check() -> None:
        async with opened(space, state) as backend:
            await image_of(backend, state)
            image = await backend.prepare(str(folder))
            spec = SandboxSpec(image=image, memory_mib=64, disk_mib=16, pids=48)
            box = await backend.create(spec, image=image, session="built")
            seen = await sh(box, "cat deep/file d/file; echo $COLOUR; touch deep/mine; rm d")
            assert seen.stdout.head == b"made\nmade\nblue\n"
            changes = {c.path: c.kind for c in await box.diff()}
            assert changes == {"d": "deleted", "deep/mine": "file"}

    asyncio.run(check())


# ---------------------------------------------------------------------- many, idle, and orphans


def test_idle_sandboxes_hold_no_connection_and_all_are_one_watch(space: str, state: Path) -> None:
    async def check() -> None:
        async with proxied() as proxy, opened(space, state, proxy, idle_s=0.5, creates_at_once=2) as backend:
            boxes = await asyncio.gather(*(make(backend, state) for _ in range(4)))
            assert backend.pressure.peak <= 2
            assert proxy.count("watch=1") == backend.pods.counts.watches == 1
            await asyncio.sleep(2.0)
            opened_so_far = proxy.count("/exec")
            assert not backend.connections
            results = await asyncio.gather(*(sh(box, "echo $HOSTNAME on") for box in boxes))
            assert all(result.stdout.head.endswith(b"on\n") for result in results)
            assert proxy.count("/exec") == opened_so_far + len(boxes)

    asyncio.run(check())


ABANDON = """
import asyncio, os, sys
from pathlib import Path
from agentrl.types import SandboxSpec
from envs.sandbox.contract import ExecRequest
from envs.sandbox.kubernetes import KubernetesBackend
from envs.sandbox.kubernetes_pod import Placement

async def main():
    place = Placement(namespace=sys.argv[1], reach="exec")
    backend = KubernetesBackend(Path(sys.argv[2]), placement=place, lease_s=4.0)
    image = await backend.prepare(sys.argv[3])
    spec = SandboxSpec(image=image, memory_mib=64, disk_mib=16, pids=48)
    box = await backend.create(spec, image=image, session="abandoned")
    await box.exec(ExecRequest(exec_id="1", command="setsid sleep 300 > /dev/null 2>&1 &"))
    print(box.info.id, flush=True)
    os._exit(9)

asyncio.run(main())
"""


def test_pods_of_a_backend_that_died_end_by_themselves_and_are_swept(
    space: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def folder() -> None:
        async with opened(space, state) as backend:
            await image_of(backend, state)

    asyncio.run(folder())
    words = [sys.executable, "-c", textwrap.dedent(ABANDON), space, str(state), str(state / "environment")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 9, done.stderr
    name = done.stdout.strip()
    wait_until(lambda: pod_json(space, name)["status"]["phase"] == "Succeeded", 60)
    monkeypatch.setattr(kubernetes, "REAP_SLACK_S", 0.0)

    async def sweep() -> None:
        async with opened(space, state) as backend:
            box = await make(backend, state)  # Sweeps on the way.
            assert (await sh(box, "true")).exit_code == 0

    asyncio.run(sweep())
    wait_until(lambda: f"pod/{name}" not in pods_in(space), 60)


def test_a_backend_that_died_is_taken_up_by_the_next_one_of_its_owner(space: str, state: Path) -> None:
    async def folder() -> None:
        async with opened(space, state) as backend:
            await image_of(backend, state)

    asyncio.run(folder())
    program = textwrap.dedent(ABANDON).replace("image = await", "backend.outlive('me'); image = await")
    program = program.replace("lease_s=4.0", "lease_s=60.0").replace("setsid", "echo x > mark; setsid")
    words = [sys.executable, "-c", program, space, str(state), str(state / "environment")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 9, done.stderr

    async def check() -> None:
        placement = Placement(namespace=space, reach="exec")
        backend = KubernetesBackend(state, placement=placement)
        backend.outlive("me")
        try:
            assert await backend.adopt("another") is None
            box = await backend.adopt("abandoned")
            assert box is not None
            assert isinstance(box, Outliving)
            assert box.info.id == done.stdout.strip()
            assert (await sh(box, "cat mark")).stdout.head == b"x\n"
            assert [c.path for c in await box.diff()] == ["mark"]
            memory = await box.recall()
            assert set(memory.execs) >= {"1"}
            assert await backend.adopt("abandoned") is None
            assert await backend.forget() == 0
        finally:
            await backend.close()
        await asyncio.to_thread(nothing_left, space, backend.id)

    asyncio.run(check())


def test_a_backend_whose_owner_was_swept_makes_sandboxes_again(space: str, state: Path) -> None:
    """It slept longer than its lease and another swept what its pods belong to: those go, later ones stay."""

    async def check() -> None:
        async with opened(space, state, lease_s=9.0) as backend:
            box = await make(backend, state)
            name = f"configmap/agentrl-{backend.id}"
            await asyncio.to_thread(kubectl, "delete", name, namespace=space)
            await asyncio.to_thread(wait_until, lambda: name in backends_in(space))
            again = await make(backend, state)
            await asyncio.sleep(3)  # In which the cluster would collect what belongs to nothing.
            assert (await sh(again, "echo on")).stdout.head == b"on\n"
            with pytest.raises(SandboxLost):
                await sh(box, "sleep 30")

    asyncio.run(check())


def test_one_backend_never_touches_what_another_one_made(space: str, state: Path) -> None:
    async def check() -> None:
        async with opened(space, state) as mine:
            box = await make(mine, state)
            async with opened(space, state) as other:
                await make(other, state)
                assert await other.reap() == 0
            assert (await sh(box, "echo on")).stdout.head == b"on\n"

    asyncio.run(check())


# ---------------------------------------------------------------------- over the pod network, from inside


KNOCK = f"""
import socket
for family, where in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    for word in (b"", b"GET / HTTP/1.0\\r\\n\\r\\n", b"\\0\\0\\0\\2\\0\\0\\0\\0" + b"{{}}", b"\\xff" * 5000):
        for _ in range(5):
            try:
                with socket.create_connection((where, {PORT}), 5) as knock:
                    knock.sendall(word)
                    knock.settimeout(6)
                    assert not word or knock.recv(100) == b""
            except OSError:
                pass
try:
    socket.create_server(("", {PORT}), reuse_port=True)
    print("took the port")
except OSError:
    print("taken")
"""


def test_a_service_account_with_the_least_rights_is_enough(
    space: str, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl("apply", "-f", str(DEPLOY / "rbac.yaml"), namespace=space)
    wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    path = f"/api/v1/namespaces/{space}/serviceaccounts/agentrl-gateway/token"
    made = json.loads(kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(wanted)))
    config = json.loads(kubectl("config", "view", "--raw", "--minify", "-o", "json"))["clusters"][0][
        "cluster"
    ]
    host, _, port = config["server"].removeprefix("https://").partition(":")
    (tmp_path / "token").write_text(made["status"]["token"])
    (tmp_path / "namespace").write_text(space)
    (tmp_path / "ca.crt").write_bytes(Path(config["certificate-authority"]).read_bytes())
    monkeypatch.setattr(kubernetes_api, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)

    async def check() -> None:
        base = f"agentrl/base:{rootfs.identity()}"  # Its rights do not reach to the nodes.
        backend = KubernetesBackend(state, placement=Placement(), base_image=base)
        try:
            await asyncio.to_thread(backend.check)
            assert backend.reach == "pod"
            box = await make(backend, state)
            assert (await sh(box, "python3 app.py")).stdout.head == b"hello\n"
            request = ExecRequest(
                exec_id="knock", argv=("python3", "-I", "-S", "-c", KNOCK), user="root", timeout_s=100
            )
            knocking = asyncio.create_task(box.exec(request))
            while not knocking.done():
                assert (await sh(box, "true")).exit_code == 0
                await asyncio.sleep(0.1)
            assert (await knocking).stdout.head == b"taken\n"
        finally:
            await backend.close()
        await asyncio.to_thread(nothing_left, space, backend.id)

    asyncio.run(check())
