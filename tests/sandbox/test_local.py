"""What is particular to the local backend: nothing is left behind, whoever dies; what is refused is named."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.errors import SandboxError, SandboxLost
from agentrl.types import SandboxSpec
from envs.grading import NO_ROOM
from envs.sandbox import cgroups, namespaces, probe
from envs.sandbox.conformance import Case, sh
from envs.sandbox.contract import ExecRequest
from envs.sandbox.interpreter import base_python
from envs.sandbox.local import LocalBackend

pytestmark = pytest.mark.sandbox
ROOT = Path(__file__).parents[2]


def kill_agent(box: object) -> None:
    os.kill(box.agent_pid, signal.SIGKILL)  # type: ignore[attr-defined]


def groups_of(backend_id: str) -> list[str]:
    hierarchy = cgroups.detect()
    parents = set() if hierarchy is None else set(hierarchy.parents.values())
    return [n for p in parents for n in os.listdir(p) if n.startswith(f"agentrl-{backend_id}")]


def mounted(below: Path) -> list[str]:
    """Mounts of this process in a folder; others on the machine may have theirs."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(below) in line]


def children(pid: int) -> set[int]:
    """All descendants of a process."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found: set[int] = set()
    todo = [pid]
    while todo:
        parent = todo.pop()
        for child in [c for c, p in parents.items() if p == parent]:
            found.add(child)
            todo.append(child)
    return found


def test_nothing_is_left_after_any_kind_of_end(backend: LocalBackend, tmp_path: Path) -> None:
    case = Case(backend, tmp_path, kill_agent)

    async def run() -> None:
        await case.image()
        async with case.sandbox():
            pass  # The zygote runs from here on.
        descriptors = len(os.listdir("/proc/self/fd"))
        mounts = mounted(tmp_path)
        before = children(os.getpid())

        async def life(number: int) -> None:
            async with case.sandbox() as box:
                if number % 4 == 0:
                    await sh(box, "setsid sleep 300 > /dev/null 2>&1 & head -c 1M /dev/zero > big")
                elif number % 4 == 1:
                    kill_agent(box)
                    with pytest.raises(SandboxLost):
                        await sh(box, "true")
                elif number % 4 == 2:
                    task = asyncio.create_task(sh(box, "sleep 300"))
                    await asyncio.sleep(0.05)
                    task.cancel()
                    await asyncio.wait([task])

        await asyncio.gather(*(life(n) for n in range(16)))
        with pytest.raises(SandboxError):
            await backend.create(
                SandboxSpec(image="x", workdir="/home/policy/" + "x" * 300),
                image=await case.image(),
                session="test",
            )
        await asyncio.sleep(0.3)
        assert children(os.getpid()) <= before
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert mounted(tmp_path) == mounts
        assert groups_of(str(os.getpid())) == []
        logs = (tmp_path / "state" / "run").glob("*/*.log")
        assert {log.name for log in logs} == {"zygote.log"}
        await backend.close()
        assert list((tmp_path / "state" / "run").iterdir()) == []
        assert children(os.getpid()) == set()

    asyncio.run(run())


def limit_with(spare: int) -> int:
    """The limit below which so many numbers of descriptors are free."""

    def is_free(number: int) -> bool:
        try:
            os.fstat(number)
        except OSError:
            return True
        return False

    return next(itertools.islice(filter(is_free, itertools.count()), spare, None))


def test_without_descriptors_left_no_sandbox_is_made_and_nothing_of_it_stays(
    backend: LocalBackend, tmp_path: Path
) -> None:
    case = Case(backend, tmp_path, kill_agent)

    async def run() -> None:
        spec = SandboxSpec(image=await case.image(), memory_mib=64, disk_mib=8)
        async with case.sandbox() as first:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            gc.collect()  # else descriptors of what other tests left in cycles go while these are counted
            before, held = children(os.getpid()), len(os.listdir("/proc/self/fd"))
            for spare in range(8):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit_with(spare), hard))
                try:
                    box = await backend.create(spec, image=spec.image, session="test")
                    await box.close()
                except (OSError, SandboxError):
                    pass
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            async with asyncio.timeout(20):
                while children(os.getpid()) - before or len(os.listdir("/proc/self/fd")) != held:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (await sh(first, "echo on")).stdout.head == b"on\n"
            async with case.sandbox() as box:
                assert (await sh(box, "echo on")).stdout.head == b"on\n"
        assert groups_of(str(os.getpid())) == []
        await backend.close()

    asyncio.run(run())


def test_a_log_that_can_not_be_opened_leaves_no_socket(backend: LocalBackend, tmp_path: Path) -> None:
    case = Case(backend, tmp_path, kill_agent)

    async def run() -> None:
        image = await case.image()
        gc.collect()
        held = len(os.listdir("/proc/self/fd"))
        (backend._folder / "zygote.log").mkdir(parents=True)
        for _ in range(3):
            with pytest.raises(OSError, match="Is a directory"):
                await backend.create(SandboxSpec(image=image), image=image, session="test")
        assert len(os.listdir("/proc/self/fd")) == held
        (backend._folder / "zygote.log").rmdir()
        async with case.sandbox() as box:
            assert (await sh(box, "echo on")).stdout.head == b"on\n"
        await backend.close()

    asyncio.run(run())


def test_sparse_files_that_are_whole_ones_elsewhere_are_the_policys_doing(
    backend: LocalBackend, tmp_path: Path
) -> None:
    """A policy must not learn to end a bad attempt without a score of its own."""
    case = Case(backend, tmp_path, kill_agent)

    async def run() -> None:
        async with case.sandbox(disk_mib=16) as box:
            await sh(box, "for i in 1 2 3 4; do truncate -s 10M sparse$i; done")
            changes = await box.diff()
        with pytest.raises(OSError, match="No space") as refused:
            async with case.sandbox(disk_mib=16, apply=changes):
                pass
        assert refused.value.errno in NO_ROOM  # what `grading` makes a fault of the policy
        await backend.close()

    asyncio.run(run())


def test_a_sandbox_costs_three_descriptors(backend: LocalBackend, tmp_path: Path) -> None:
    case = Case(backend, tmp_path, kill_agent)

    async def run() -> None:
        async with case.sandbox():
            one = len(os.listdir("/proc/self/fd"))
            async with case.sandbox(), case.sandbox():
                assert len(os.listdir("/proc/self/fd")) - one == 6
        await backend.close()

    asyncio.run(run())


HOST = """
import asyncio, sys
from pathlib import Path
from agentrl.types import SandboxSpec
from envs.sandbox.contract import ExecRequest
from envs.sandbox.local import LocalBackend

async def main():
    backend = LocalBackend(Path(sys.argv[1]) / "state")
    image = await backend.prepare(sys.argv[1] + "/environment")
    box = await backend.create(SandboxSpec(image=image), image=image, session="s")
    request = ExecRequest(exec_id="1", command="setsid sleep 300 & sleep 300; true", timeout_s=300)
    asyncio.ensure_future(box.exec(request))
    while (await box.probe()).processes < 3:
        await asyncio.sleep(0.01)
    print(box.agent_pid, backend._zygote._process.pid, flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


@pytest.mark.parametrize("with_zygote", [False, True])
def test_a_sandbox_ends_with_its_host(backend: LocalBackend, tmp_path: Path, with_zygote: bool) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "a").write_text("a")
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert host.stdout is not None
    agent, zygote = (int(word) for word in host.stdout.readline().split())
    inside = children(agent)
    assert len(inside) >= 3
    if with_zygote:
        os.kill(zygote, signal.SIGKILL)
    host.kill()
    host.wait()
    host.stdout.close()
    until = time.monotonic() + 10
    everyone = {agent, *inside}
    while any(Path(f"/proc/{pid}").exists() for pid in everyone) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [pid for pid in everyone if Path(f"/proc/{pid}").exists()]
    while (folders := list((tmp_path / "state/run").iterdir())) and time.monotonic() < until:
        if with_zygote:  # Nobody was left to clean up: the next backend does.

            async def successor() -> None:
                other = LocalBackend(tmp_path / "state")
                image = await other.prepare(str(tmp_path / "environment"))
                box = await other.create(SandboxSpec(image=image), image=image, session="s")
                await box.close()
                await other.close()

            asyncio.run(successor())
        time.sleep(0.02)
    assert folders == []
    assert groups_of(str(host.pid)) == []


def test_a_dead_zygote_costs_nothing_but_a_new_one(backend: LocalBackend, tmp_path: Path) -> None:
    case = Case(backend, tmp_path, kill_agent)

    async def run() -> None:
        async with case.sandbox() as old:
            assert backend._zygote is not None
            backend._zygote._process.kill()
            backend._zygote._process.wait()
            assert (await sh(old, "echo on")).exit_code == 0
            async with case.sandbox() as new:
                assert (await sh(new, "echo on")).exit_code == 0
            assert (await sh(old, "echo on")).exit_code == 0
        await backend.close()

    asyncio.run(run())


REFUSED = """
import sys
from pathlib import Path
from agentrl.errors import SandboxError
from envs.sandbox import namespaces
from envs.sandbox.local import LocalBackend
namespaces.install_seccomp()  # the kernel of this process refuses unshare from here on
try:
    LocalBackend(Path(sys.argv[1])).check()
except SandboxError as error:
    print(error.code, "|", error)
else:
    print("accepted")
"""


def test_what_the_kernel_refuses_is_named_with_a_fix(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", REFUSED, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert answer.stdout.startswith("no_"), answer.stderr
    assert "unshare" in answer.stdout
    assert "EPERM" in answer.stdout
    assert "--insecure-local" in answer.stdout


def test_a_network_is_refused_and_never_shared(backend: LocalBackend, tmp_path: Path) -> None:
    case = Case(backend, tmp_path, kill_agent)

    async def run() -> None:
        image = await case.image()
        with pytest.raises(SandboxError) as caught:
            await backend.create(SandboxSpec(image=image, network="public"), image=image, session="s")
        assert caught.value.code == "network_unsupported"
        with pytest.raises(SandboxError) as caught:
            await backend.create(SandboxSpec(image=image, workdir="/usr/x"), image=image, session="s")
        assert caught.value.code == "bad_path"
        await backend.close()

    asyncio.run(run())


def test_the_zygote_stays_small(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from envs.sandbox import zygote;"
        "print(len(sys.modules), [m for m in ('pydantic', 'asyncio', 'agentrl') if m in sys.modules])"
    )
    answer = subprocess.run(
        [base_python(), "-I", "-S", "-c", code, str(ROOT)], capture_output=True, text=True, timeout=60
    )
    count, _, heavy = answer.stdout.strip().partition(" ")
    assert heavy == "[]", answer.stderr
    assert int(count) < 150


def test_limits_are_claimed_only_when_the_kernel_took_them(backend: LocalBackend, tmp_path: Path) -> None:
    case = Case(backend, tmp_path, kill_agent)

    async def run() -> None:
        async with case.sandbox() as box:
            limits = set(box.info.limits_enforced)
            assert {"pids", "disk", "network"} <= limits
            assert ("memory" in limits) == backend.limits_memory
            assert (box.info.isolation, box.info.backend) == ("namespaces", "local")
            assert box.info.image_digest == await case.image()
            assert (await box.probe()).instance == box.info.instance
            many = await box.exec(
                ExecRequest(exec_id="pids", command="for i in $(seq 100); do sleep 5 & done 2>&1 | head -1")
            )
            assert b"fork" in many.stdout.head
        await backend.close()

    asyncio.run(run())


def test_version_2_groups_are_made_where_controllers_are_handed_down(tmp_path: Path) -> None:
    """On a copy of the layout: the process is in a leaf, whose parent hands memory and pids down."""
    top = tmp_path / "cgroup"
    leaf = top / "user.slice" / "session"
    leaf.mkdir(parents=True)
    (top / "user.slice" / "cgroup.subtree_control").write_text("memory pids cpu")
    own, mounts = tmp_path / "own", tmp_path / "mountinfo"
    own.write_text("0::/user.slice/session\n")
    mounts.write_text(f"30 20 0:26 / {top} rw,nosuid - cgroup2 cgroup2 rw\n")
    (leaf / "cgroup.subtree_control").mkdir()  # can be neither read nor written as a file
    found = cgroups.detect(str(own), str(mounts))
    assert found is not None
    assert found.version == 2
    assert found.parents == dict.fromkeys(("memory", "pids", "cpu"), str(top / "user.slice"))
    spec = SandboxSpec(image="x", memory_mib=100, disk_mib=50, pids=10, cpus=0.5)
    group = found.create("agentrl-x", spec)
    made = top / "user.slice" / "agentrl-x"
    assert (made / "memory.max").read_text() == str((100 + 50 + 64) * 1024 * 1024)
    assert (made / "memory.swap.max").read_text() == "0"
    assert (made / "pids.max").read_text() == str(10 + 64)
    assert (made / "cpu.max").read_text() == "50000 100000"
    assert group.procs == (str(made / "cgroup.procs"),)
    assert group.oom_file == str(made / "memory.events")
    assert group.limits == ("memory", "pids", "cpu")


def test_version_1_paths_of_a_process_inside_a_container_are_below_the_mount(tmp_path: Path) -> None:
    for name in ("memory", "pids"):
        (tmp_path / name / "sub").mkdir(parents=True)
    own, mounts = tmp_path / "own", tmp_path / "mountinfo"
    own.write_text("4:memory:/docker/abc/sub\n8:pids:/sub\n0::/\n")
    mounts.write_text(
        f"30 20 0:26 /docker/abc {tmp_path}/memory rw - cgroup cgroup rw,memory\n"
        f"31 20 0:27 / {tmp_path}/pids rw - cgroup cgroup rw,pids\n"
    )
    found = cgroups.detect(str(own), str(mounts))
    assert found is not None
    assert found.version == 1
    assert found.parents == {"memory": f"{tmp_path}/memory/sub", "pids": f"{tmp_path}/pids/sub"}


def test_the_machine_probe_gives_every_finding_a_status_and_every_lack_a_fix(tmp_path: Path) -> None:
    findings = probe.probe_machine(tmp_path / "state")
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names))
    assert {"local sandboxes", "control groups", "docker engine", "kubernetes", "disk"} <= set(names)
    for finding in findings:
        assert finding.detail
        assert finding.fix or finding.status == "ok", finding


def test_the_filter_is_a_well_formed_program() -> None:
    program = namespaces._program()
    for at, (code, when_true, when_false, _) in enumerate(program):
        if code in (0x15, 0x35, 0x45):
            assert at + 1 + max(when_true, when_false) < len(program)
    assert program[-1][0] == program[-2][0] == 0x06
