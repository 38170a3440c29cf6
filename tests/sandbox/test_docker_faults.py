"""What goes wrong with engines and containers, on a real engine: each fault ends as its own kind, nothing is
blamed on the policy, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from engines import (
    Rule,
    containers_of,
    docker,
    engine_or_skip,
    image_of,
    kill_container,
    mounts_below,
    opened,
    proxied,
)

from agentrl.errors import BoundaryError, SandboxError, SandboxLost, TaskError
from agentrl.types import ExecStatus, SandboxSpec
from envs.sandbox import docker_disk, rootfs
from envs.sandbox.conformance import quiet, sh
from envs.sandbox.contract import ExecRequest
from envs.sandbox.docker import DockerBackend
from envs.sandbox.engine import EngineUnknown
from envs.sandbox.images import folder_digest
from envs.sandbox.live import LiveSandbox

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module", autouse=True)
def engine() -> str:
    return engine_or_skip()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by this file's tests, so that the image is prepared once."""
    return tmp_path_factory.mktemp("state")


async def make(
    backend: DockerBackend, state: Path, *, deadline_s: float = 60.0, **limits: int
) -> LiveSandbox:
    image = await image_of(backend, state)
    spec = SandboxSpec(image=image, **{"memory_mib": 128, "disk_mib": 16, "pids": 48, **limits})
    return await backend.create(spec, image=image, session="faults", deadline_s=deadline_s)


def disks_held() -> int:
    """Descriptors of this process that keep a sandbox's disk."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{fd}").endswith("/upper")
    return found


def engine_pid() -> int:
    """The daemon behind the socket, by its own pid file."""
    try:
        return int(Path("/var/run/docker.pid").read_text())
    except OSError:
        pytest.skip("the engine's pid file is not readable here")


# -------------------------------------------------------------------------------------- loss of a container


def test_a_container_killed_in_a_command_is_lost_and_says_how(state: Path) -> None:
    async def check() -> None:
        async with opened(state) as backend:
            box = await make(backend, state)
            running = asyncio.create_task(sh(box, "sleep 300"))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(kill_container, box)
            with pytest.raises(SandboxLost) as caught:
                await asyncio.wait_for(running, 10)
            assert caught.value.owner == "environment"
            assert caught.value.evidence["exit"] == 137
            assert caught.value.evidence["oom_killed"] is False

    asyncio.run(check())


def test_a_container_killed_between_commands_is_lost_at_the_next(state: Path) -> None:
    async def check() -> None:
        async with opened(state) as backend:
            box = await make(backend, state)
            assert (await sh(box, "echo changed > app.py")).exit_code == 0
            await asyncio.to_thread(kill_container, box)
            with pytest.raises(SandboxLost):
                await sh(box, "true")
            with pytest.raises(SandboxLost):
                await box.probe()
            assert [(c.path, c.content) for c in await box.diff()] == [("app.py", b"changed\n")]

    asyncio.run(check())


def test_a_restarted_container_does_not_come_back_to_life(state: Path) -> None:
    async def check() -> None:
        async with opened(state) as backend:
            box = await make(backend, state)
            first = (await box.probe()).instance
            assert first == box.info.instance
            await asyncio.to_thread(docker, "restart", "-t", "0", box.info.id)
            with pytest.raises(SandboxLost) as caught:
                await sh(box, "echo on a blank container")
            assert caught.value.owner == "environment"
            await asyncio.wait_for(asyncio.to_thread(docker, "wait", box.info.id), 20)
            with pytest.raises(SandboxLost):
                await box.probe()
            assert docker("inspect", "-f", "{{.State.Running}}", box.info.id) == "false"

    asyncio.run(check())


# ----------------------------------------------------------------------------------------- a sick engine


def test_a_frozen_engine_stops_no_command_and_fails_no_sandbox(state: Path) -> None:
    async def check() -> None:
        async with opened(state) as backend:
            box, doomed = await make(backend, state), await make(backend, state)
            pid = engine_pid()
            os.kill(pid, signal.SIGSTOP)
            try:
                for _ in range(20):
                    assert (await asyncio.wait_for(sh(box, "true"), 5)).exit_code == 0
                waiting = asyncio.create_task(make(backend, state))
                begun = time.monotonic()
                await doomed.close()
                assert time.monotonic() - begun < 1.0
                await asyncio.sleep(3)
                assert not waiting.done()
            finally:
                os.kill(pid, signal.SIGCONT)
            late = await waiting
            assert (await sh(late, "echo on")).stdout.head == b"on\n"
            assert (await box.probe()).alive

    asyncio.run(check())


def test_a_create_whose_answer_is_lost_is_adopted_and_made_once(state: Path, tmp_path: Path) -> None:
    async def check() -> None:
        async with proxied(tmp_path) as proxy, opened(state, proxy.path) as backend:
            await image_of(backend, state)
            proxy.rules = [
                Rule("POST /v1.40/containers/create", "drop_answer", times=1),
                Rule("/start", "drop_answer", times=1),
            ]
            box = await make(backend, state)
            assert (await sh(box, "echo on")).stdout.head == b"on\n"
            assert [rule.hits for rule in proxy.rules] == [1, 1]
            assert containers_of(backend) == [box.info.id]

    asyncio.run(check())


def test_a_slow_start_is_waited_for(state: Path, tmp_path: Path) -> None:
    async def check() -> None:
        async with proxied(tmp_path) as proxy, opened(state, proxy.path) as backend:
            await image_of(backend, state)
            proxy.rules = [Rule("/start", "delay", seconds=4)]
            box = await make(backend, state)
            assert box.info.ready_ms > 4000
            # The time of a command holds nothing of the engine's.
            assert (await sh(box, "true", timeout_s=1)).exit_code == 0

    asyncio.run(check())


@pytest.mark.parametrize(
    ("route", "phase"), [("/containers/create", "create"), ("/start", "start"), ("/info", "info")]
)
def test_a_route_that_never_answers_ends_as_the_environments_fault_with_its_phase(
    state: Path, tmp_path: Path, route: str, phase: str
) -> None:
    async def check() -> None:
        async with proxied(tmp_path) as proxy, opened(state, proxy.path) as backend:
            await image_of(backend, state)
            backend._facts = None  # as if that had brought nothing new to the engine
            proxy.rules = [Rule(route, "never")]
            begun = time.monotonic()
            with pytest.raises(SandboxError) as caught:
                await make(backend, state, deadline_s=2)
            assert time.monotonic() - begun < 6
            assert (caught.value.owner, caught.value.retryable) == ("environment", True)
            assert caught.value.phase in (phase, "prepare")
            assert caught.value.code in ("start_timeout", "engine_timeout")
            proxy.rules = []

    asyncio.run(check())


def test_a_create_that_is_cancelled_anywhere_leaves_nothing(state: Path) -> None:
    async def check() -> None:
        async with opened(state) as backend:
            await image_of(backend, state)
            before = len(os.listdir("/proc/self/fd"))
            for wait_s in (0.0, 0.003, 0.006, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.4):
                task = asyncio.create_task(make(backend, state))
                await asyncio.sleep(wait_s)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await (await task).close()
            assert backend.pressure.in_flight == 0
            await backend.close()
            assert list((state / "docker" / "run").glob(f"{backend.id}/*")) == []
            assert len(os.listdir("/proc/self/fd")) <= before

    asyncio.run(check())


def test_a_cancelled_start_waits_for_the_mounts_that_it_must_give_back(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = docker_disk.make
    begun = threading.Event()

    def slow(folder: Path, lower: Path, *, workdir: str, disk_mib: int) -> tuple[dict[str, str], int]:
        made = prompt(folder, lower, workdir=workdir, disk_mib=disk_mib)
        begun.set()
        time.sleep(0.5)
        return made

    async def check() -> None:
        async with opened(state) as backend:
            await image_of(backend, state)
            monkeypatch.setattr(docker_disk, "make", slow)
            task = asyncio.create_task(make(backend, state))
            assert await asyncio.to_thread(begun.wait, 10)
            assert disks_held() == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await backend.close()
            await asyncio.sleep(1.0)
            assert disks_held() == 0

    asyncio.run(check())


def test_a_container_that_comes_after_its_create_was_given_up_is_removed(state: Path, tmp_path: Path) -> None:
    async def check() -> None:
        async with proxied(tmp_path) as proxy, opened(state, proxy.path) as backend:
            await image_of(backend, state)
            proxy.rules = [Rule("/containers/create", "late", times=1, seconds=1.0)]
            task = asyncio.create_task(make(backend, state))
            while not proxy.rules[0].hits:  # noqa: ASYNC110  (another task's counter)
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # The whole request is on its way.
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            proxy.rules = []
            await backend.close()
            await asyncio.sleep(1.5)

    asyncio.run(check())


def test_a_list_that_never_answers_holds_up_nobody(state: Path, tmp_path: Path) -> None:
    async def check() -> None:
        async with proxied(tmp_path) as proxy, opened(state, proxy.path) as backend:
            proxy.rules = [Rule("/containers/json", "never")]
            box = await make(backend, state)
            assert (await sh(box, "echo on")).exit_code == 0

    asyncio.run(check())


def test_a_removal_that_never_answers_is_a_leak_that_is_counted_and_then_cleared(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.sandbox.docker.REMOVE_DEADLINE_S", 0.5)

    async def check() -> None:
        async with proxied(tmp_path) as proxy, opened(state, proxy.path) as backend:
            box = await make(backend, state)
            proxy.rules = [Rule("DELETE", "never")]
            begun = time.monotonic()
            await box.close()
            assert time.monotonic() - begun < 1.0
            await asyncio.sleep(1.0)
            assert backend.leaked == 1
            proxy.rules = []
            await backend.close()
            assert backend.leaked == 0

    asyncio.run(check())


def test_an_engine_that_refuses_is_the_environments_fault(state: Path, tmp_path: Path) -> None:
    async def check() -> None:
        async with proxied(tmp_path) as proxy, opened(state, proxy.path) as backend:
            await image_of(backend, state)
            proxy.rules = [Rule("/containers/create", "refuse")]
            with pytest.raises(SandboxError) as caught:
                await make(backend, state)
            assert (caught.value.owner, caught.value.code) == ("environment", "engine_500")

    asyncio.run(check())


def test_an_engine_that_is_not_there_is_named(tmp_path: Path) -> None:
    backend = DockerBackend(tmp_path, host=f"unix://{tmp_path}/none.sock")

    async def check() -> None:
        (tmp_path / "environment").mkdir()
        with pytest.raises(EngineUnknown) as unreachable:
            await backend.prepare(str(tmp_path / "environment"))
        assert unreachable.value.code == "engine_unreachable"
        await backend.close()

    asyncio.run(check())


def test_no_more_than_the_limit_start_at_once_and_commands_never_reach_the_engine(
    state: Path, tmp_path: Path
) -> None:
    async def check() -> None:
        async with proxied(tmp_path) as proxy, opened(state, proxy.path, creates_at_once=2) as backend:
            await image_of(backend, state)
            other = tmp_path / "other"
            other.mkdir()
            (other / "Dockerfile").write_text(f"FROM agentrl/base:{rootfs.identity()}\nENV PROBED=yes\n")
            before = len(proxy.seen)
            _, *boxes = await asyncio.gather(
                backend.prepare(str(other)), *(make(backend, state) for _ in range(6))
            )
            assert sum("/start" in line for line in proxy.seen[before:]) == 7  # The other image was tried.
            assert backend.pressure.peak == 2
            assert max(proxy.peak["start"], proxy.peak["create"]) <= 2
            before = len(proxy.seen)
            await asyncio.gather(*(sh(box, "true") for box in boxes for _ in range(10)))
            assert [line for line in proxy.seen[before:] if "exec" in line] == []

    asyncio.run(check())


# --------------------------------------------------------------------------------- what the policy may do


def test_memory_running_out_is_told_from_a_kill_and_from_an_exit_code(state: Path) -> None:
    hog = "data = []\nwhile True: data.append(bytearray(8 << 20))"

    async def check() -> None:
        async with opened(state) as backend:
            box = await make(backend, state, memory_mib=48)
            alone = await box.exec(ExecRequest(exec_id="a", argv=("python3", "-I", "-S", "-c", hog)))
            assert (alone.status, alone.exit_code) == (ExecStatus.OOM, None)
            killed = await sh(box, "kill -9 $$")
            assert (killed.status, killed.signal) == (ExecStatus.SIGNALED, signal.SIGKILL)
            child = await sh(box, f"python3 -I -S -c '{hog}'; exit 0")
            assert (child.status, child.exit_code) == (ExecStatus.OOM, 0)
            assert (await box.probe()).alive
            assert (await sh(box, "echo on")).stdout.head == b"on\n"

    asyncio.run(check())


def test_a_fork_bomb_that_stays_is_the_policys_and_ends_with_its_sandbox(state: Path) -> None:
    async def check() -> None:
        async with opened(state) as backend:
            bombed, other = await make(backend, state), await make(backend, state)
            bomb = "import os, time\nwhile True:\n try: os.fork()\n except OSError: time.sleep(0.05)"
            started = await sh(bombed, f"setsid python3 -I -S -c '{bomb}' > /dev/null 2>&1 & sleep 1")
            assert started.exit_code == 0
            # There may be no process left for a command: that is its result, not a fault of the environment.
            for _ in range(3):
                result = await sh(bombed, "true")
                assert (result.status, result.exit_code in (0, 127, 254)) == (ExecStatus.EXITED, True)
            for _ in range(5):
                assert (await asyncio.wait_for(sh(other, "true"), 3)).exit_code == 0
            assert (await bombed.probe()).processes <= 48 + 4
            assert await bombed.kill_all() > 0
            assert await quiet(bombed) == 0
            assert (await sh(bombed, "echo on")).stdout.head == b"on\n"

    asyncio.run(check())


# ----------------------------------------------------------------------------------------------- ownership


def test_two_backends_on_one_engine_leave_each_other_alone(state: Path, tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(state) as one, opened(tmp_path) as other:
            mine, theirs = await make(one, state), await make(other, tmp_path)
            assert await one.reap() == await other.reap() == 0
            await one.close()
            assert containers_of(one) == []
            assert (await sh(theirs, "echo on")).stdout.head == b"on\n"
            with pytest.raises(SandboxLost):
                await sh(mine, "true")

    asyncio.run(check())


_DIES = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_docker_faults import make
from envs.sandbox.docker import DockerBackend

async def main():
    backend = DockerBackend(Path({state!r}), lease_s={lease_s}, orphan_grace_s={grace_s})
    box = await make(backend, Path({state!r}))
    print(box.info.id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def _leave_an_orphan(state: Path, *, lease_s: float, grace_s: float) -> str:
    program = textwrap.dedent(_DIES).format(
        tests=str(Path(__file__).parent), state=str(state), lease_s=lease_s, grace_s=grace_s
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout.strip()


def test_an_orphan_is_reaped_when_its_owner_is_dead_and_its_lease_is_over(tmp_path: Path) -> None:
    name = _leave_an_orphan(tmp_path, lease_s=1, grace_s=300)
    time.sleep(2.1)  # The deadline on the label is in whole seconds, rounded up.

    async def check() -> None:
        async with opened(tmp_path) as backend:
            assert await backend.reap() == 1

    asyncio.run(check())
    assert docker("ps", "-aq", "--filter", f"name={name}") == ""
    assert mounts_below(tmp_path) == []
    assert list((tmp_path / "docker" / "run").iterdir()) == []


def test_an_orphan_with_a_valid_lease_is_left_alone_and_ends_itself(tmp_path: Path) -> None:
    name = _leave_an_orphan(tmp_path, lease_s=3600, grace_s=3)

    async def check() -> None:
        backend = DockerBackend(tmp_path)
        try:
            assert await backend.reap() == 0
            assert docker("inspect", "-f", "{{.State.Running}}", name) == "true"
            until = time.monotonic() + 10
            while docker("inspect", "-f", "{{.State.Running}}", name) == "true":
                assert time.monotonic() < until
                await asyncio.sleep(0.2)
            assert await backend.reap() == 1  # Dead, and nobody can adopt it any more.
        finally:
            await backend.close()

    asyncio.run(check())
    assert mounts_below(tmp_path) == []


def test_every_container_carries_its_limits_and_its_owner(state: Path) -> None:
    async def check() -> None:
        async with opened(state) as backend:
            box = await make(backend, state)
            template = (
                "{{json .HostConfig.Memory}} {{json .HostConfig.MemorySwap}} {{json .HostConfig.PidsLimit}} "
                "{{json .HostConfig.NanoCpus}} {{.HostConfig.NetworkMode}} {{.HostConfig.LogConfig.Type}} "
                "{{.HostConfig.ReadonlyRootfs}} {{json .HostConfig.CapDrop}} "
                "{{.HostConfig.RestartPolicy.Name}} "
                '{{index .Config.Labels "agentrl.backend"}} {{json .HostConfig.PortBindings}}'
            )
            memory = (128 + 16 + 64) << 20
            assert docker("inspect", "-f", template, box.info.id) == (
                f'{memory} {memory} 52 1000000000 none none true ["ALL"] no {backend.id} null'
            )
            assert {"memory", "pids", "cpu", "disk", "network"} == set(box.info.limits_enforced)

    asyncio.run(check())


# -------------------------------------------------------------------------------------------------- images


def test_a_dockerfile_is_built_once_and_its_workdir_is_what_the_diff_compares_with(
    state: Path, tmp_path: Path
) -> None:
    async def check() -> None:
        async with proxied(tmp_path) as proxy, opened(state, proxy.path) as backend:
            await image_of(backend, state)
            base = docker("images", "-q", "agentrl/base").split()[0]
            folder = tmp_path / "environment"
            (folder / "src").mkdir(parents=True)
            (folder / "src" / "a.py").write_text("a = 1\n")
            (folder / "src" / "unlike_any_other").write_text(os.urandom(8).hex())
            (folder / "Dockerfile").write_text(
                f"FROM {base}\nENV MARK=built\nCOPY src /app/src\nRUN echo made > /app/made.txt\n"
                "RUN ln -s /etc/passwd /app/link && ln /app/made.txt /app/hard.txt\nUSER nobody\n"
            )
            digests = await asyncio.gather(*(backend.prepare(str(folder)) for _ in range(4)))
            assert len(set(digests)) == 1
            assert sum("/build" in line for line in proxy.seen) == 1
            image = digests[0]
            spec = SandboxSpec(image=image, memory_mib=128, disk_mib=16)
            box = await backend.create(spec, image=image, session="faults")
            assert await box.diff() == ()
            result = await sh(box, "cat src/a.py made.txt; echo $MARK; id -u; readlink link; cat hard.txt")
            assert result.stdout.head == b"a = 1\nmade\nbuilt\n1000\n/etc/passwd\nmade\n"
            await sh(box, "echo 2 > src/a.py; rm made.txt")
            assert [(c.path, c.kind, c.content) for c in await box.diff()] == [
                ("made.txt", "deleted", None),
                ("src/a.py", "file", b"2\n"),
            ]
            await box.close()
            docker("rmi", "--force", "agentrl/environment:" + image.removeprefix("dir:"))

    asyncio.run(check())


def test_an_image_that_a_task_names_is_what_its_sandbox_is_made_of(state: Path) -> None:
    async def check() -> None:
        name = f"agentrl/named:{os.urandom(4).hex()}"
        async with opened(state) as backend:
            await image_of(backend, state)
            docker("tag", docker("images", "-q", "agentrl/base").split()[0], name)
            try:
                image = await backend.prepare(name)
                assert (await backend.prepare(name), image.startswith("image:")) == (image, True)
                spec = SandboxSpec(image=name, memory_mib=128, disk_mib=16)
                box = await backend.create(spec, image=image, session="faults")
                assert (await sh(box, "pwd; ls -A; echo x > a")).stdout.head == b"/app\n"
                assert [(c.path, c.content) for c in await box.diff()] == [("a", b"x\n")]
                assert box.info.image_digest == image
                await box.close()
            finally:
                docker("rmi", name)

    asyncio.run(check())


def test_a_dockerfile_that_fails_is_the_tasks_fault_with_the_words_of_the_build(
    state: Path, tmp_path: Path
) -> None:
    async def check() -> None:
        async with opened(state) as backend:
            await image_of(backend, state)
            base = docker("images", "-q", "agentrl/base").split()[0]
            (tmp_path / "Dockerfile").write_text(f"FROM {base}\nRUN echo the reason >&2; exit 3\n")
            with pytest.raises(TaskError, match="the reason") as caught:
                await backend.prepare(str(tmp_path))
            assert (caught.value.owner, caught.value.code) == ("task", "build_failed")

    asyncio.run(check())


def test_an_image_without_a_python_gets_this_machines(state: Path, tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(state) as backend:
            await image_of(backend, state)
            base = docker("images", "-q", "agentrl/base").split()[0]
            (tmp_path / "Dockerfile").write_text(
                f"FROM {base}\nRUN rm /usr/local/bin/python3 /usr/local/bin/python\n"
            )
            image = await backend.prepare(str(tmp_path))
            spec = SandboxSpec(image=image, memory_mib=128, disk_mib=16)
            box = await backend.create(spec, image=image, session="faults")
            assert (await sh(box, "command -v python3 || echo none")).stdout.head == b"none\n"
            await box.close()
            docker("rmi", "--force", "agentrl/environment:" + image.removeprefix("dir:"))

    asyncio.run(check())


def test_an_image_in_which_no_python_runs_is_refused_with_the_fix(state: Path, tmp_path: Path) -> None:
    (tmp_path / "hello").write_text("hello\n")
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY hello /\n")

    async def check() -> None:
        async with opened(state) as backend:
            with pytest.raises(BoundaryError, match="python3") as caught:
                await backend.prepare(str(tmp_path))
            docker("rmi", "--force", "agentrl/environment:" + folder_digest(tmp_path).removeprefix("dir:"))
            assert (caught.value.owner, caught.value.code) == ("task", "no_python")

    asyncio.run(check())


def test_a_base_image_that_can_not_be_pulled_is_named(tmp_path: Path) -> None:
    async def check() -> None:
        backend = DockerBackend(tmp_path, base_image="registry.invalid/none:1")
        (tmp_path / "environment").mkdir()
        with pytest.raises(SandboxError, match=r"registry\.invalid/none:1") as caught:
            await backend.prepare(str(tmp_path / "environment"))
        assert (caught.value.code, caught.value.owner) == ("pull_failed", "environment")
        await backend.close()

    asyncio.run(check())
