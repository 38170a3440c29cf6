"""Cases of the field that no row of the contract's suite names: folders that change while they are compared,
folders without permissions, signals to everything in reach, users that an image does not know."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agentrl.errors import SandboxError
from agentrl.types import SandboxSpec
from envs.sandbox import trees
from envs.sandbox.agent import apply_changes, machine_kills
from envs.sandbox.contract import ExecRequest, ExecResult, FileChange, Sandbox
from envs.sandbox.diff import DiffTooLarge, diff_trees
from envs.sandbox.local import LocalBackend
from envs.sandbox.plain import PlainBackend

NOBODY = 65534


async def _nothing(_: Sandbox) -> None:
    pass


def in_a_sandbox(
    tmp_path: Path, *commands: str, then: Callable[[Sandbox], Awaitable[None]] = _nothing
) -> list[ExecResult]:
    """Commands in one sandbox whose agent is the policy's user too."""

    async def run() -> list[ExecResult]:
        backend = PlainBackend()
        folder = tmp_path / "environment"
        folder.mkdir()
        image = await backend.prepare(str(folder))
        spec = SandboxSpec(image="dir:environment", memory_mib=64, disk_mib=16)
        box: Sandbox = await backend.create(spec, image=image, session="field")
        try:
            seen = [
                await box.exec(ExecRequest(exec_id=str(n), command=command, timeout_s=20.0))
                for n, command in enumerate(commands)
            ]
            await then(box)
            return seen
        finally:
            await backend.close()

    return asyncio.run(run())


# ---------------------------------------------------------------------------------- diffs of what still moves

BECOMES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a link": lambda path: path.symlink_to("/etc/passwd"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": lambda path: os.mkfifo(path),
    "another file": lambda path: path.write_text("other"),
}


def difference(changed: Path, original: Path) -> dict[str, FileChange]:
    handle = os.open(changed, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return {change.path: change for change in diff_trees(handle, original)}
    finally:
        os.close(handle)


@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("becomes", BECOMES)
def test_a_name_that_becomes_another_while_it_is_compared_is_what_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, becomes: str
) -> None:
    """A background process of the policy goes on while its workdir is looked at or kept: no error of ours."""
    changed, original = tmp_path / "changed", tmp_path / "original"
    changed.mkdir()
    original.mkdir()
    (changed / "before").write_text("x")
    victim = changed / "moving"
    if what == "file":
        victim.write_text("seen")
    else:
        victim.mkdir()
        (victim / "inner").write_text("y")
    genuine = trees._open
    moved: list[str] = []

    def moving(name: str, folder: int, mode: int, flags: int) -> int:
        if name == "moving" and not moved:
            moved.append(name)
            shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
            BECOMES[becomes](victim)
        return genuine(name, folder, mode, flags)

    monkeypatch.setattr(trees, "_open", moving)
    found = difference(changed, original)
    assert moved
    assert found["before"].content == b"x"
    kinds = {"a folder": "dir", "a link": "symlink", "a link to itself": "symlink", "another file": "file"}
    now = found.get("moving")
    assert (None if now is None else now.kind) == kinds.get(becomes)
    assert "moving/inner" not in found


def test_a_name_that_never_rests_is_left_out_and_the_rest_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, original = tmp_path / "changed", tmp_path / "original"
    original.mkdir()
    (changed / "busy").mkdir(parents=True)
    (changed / "kept").write_text("x")
    genuine, looks = trees._open, []

    def moving(name: str, folder: int, mode: int, flags: int) -> int:
        if name == "busy":
            looks.append(name)
            raise FileNotFoundError(2, "it was just there")
        return genuine(name, folder, mode, flags)

    monkeypatch.setattr(trees, "_open", moving)
    assert set(difference(changed, original)) == {"kept"}
    assert len(looks) == trees.LOOKS


def test_a_disk_that_fails_is_no_name_that_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, original = tmp_path / "changed", tmp_path / "original"
    original.mkdir()
    changed.mkdir()
    (changed / "file").write_text("x")

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(trees, "_open", failing)
    with pytest.raises(OSError, match="Input/output"):
        difference(changed, original)


# ----------------------------------------------------------------------------- diffs of what nobody may write


def as_nobody(work: Callable[[], None]) -> int:
    """Run it as a user without any right, in a process of its own; its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_folders_that_their_owner_may_not_write_are_filled_before_they_are_closed() -> None:
    """Go's module cache is such: work that holds one must be judged, also where nobody is root."""
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder, "work")
        workdir.mkdir(mode=0o777)
        os.chmod(folder, 0o755)
        os.chmod(workdir, 0o777)
        rows = [
            {"path": "mod", "kind": "dir", "mode": 0o555},
            {"path": "mod/a.go", "kind": "file", "mode": 0o444, "size": 2},
            {"path": "mod/sub", "kind": "dir", "mode": 0o500},
            {"path": "mod/sub/b.go", "kind": "file", "mode": 0o400, "size": 1},
            {"path": "none", "kind": "dir", "mode": 0o000},
        ]
        body = b"abc"
        me = NOBODY if os.geteuid() == 0 else os.geteuid()
        gid = NOBODY if os.geteuid() == 0 else os.getegid()
        assert as_nobody(lambda: print(apply_changes(str(workdir), rows, body, me, gid))) == 0
        modes = {p: stat.S_IMODE((workdir / p).lstat().st_mode) for p in ("mod", "mod/sub", "none")}
        assert modes == {"mod": 0o555, "mod/sub": 0o500, "none": 0o000}
        for path in ("none", "mod/sub", "mod"):
            os.chmod(workdir / path, 0o755)
        assert (workdir / "mod/a.go").read_bytes() + (workdir / "mod/sub/b.go").read_bytes() == body


# ---------------------------------------------------------------- commands and their helper


def test_a_signal_to_everything_named_python_ends_no_command(tmp_path: Path) -> None:
    """`pkill python`, where the agent's helpers are processes of the policy's own user: the attempt goes
    on."""
    signals = "for name in TERM INT HUP QUIT USR1 USR2 ALRM; do kill -$name $PPID; done"
    first, second = in_a_sandbox(tmp_path, f"{signals}; echo lives", "sleep 30 & kill -TERM $!; wait $!")
    assert (first.exit_code, first.stdout.text()) == (0, "lives\n")
    assert (second.status, second.exit_code) == ("exited", 128 + 15)


@pytest.mark.sandbox
def test_a_policy_that_kills_its_own_helper_has_ended_its_command_and_nothing_else(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sandboxes have one user, as on most people's machines: no attempt ends by `kill -9 -1`, neither
    as the environment's fault nor at all."""
    monkeypatch.setattr(backend, "_uid_base", None)
    monkeypatch.setattr(backend._images, "_owner", None)
    folder = tmp_path / "environment"
    folder.mkdir()

    async def run() -> None:
        image = await backend.prepare(str(folder))
        spec = SandboxSpec(image="dir:environment", memory_mib=64, disk_mib=16)
        try:
            box = await backend.create(spec, image=image, session="field")
            for number, command in enumerate(("kill -9 -1; sleep 30", "kill -9 $PPID; sleep 30")):
                kills = machine_kills()
                ended = await box.exec(ExecRequest(exec_id=f"k{number}", command=command, timeout_s=20.0))
                if machine_kills() != kills:
                    pytest.skip("something else of this machine ran out of memory meanwhile")
                assert (ended.status, ended.signal, ended.kill_verified) == ("signaled", 9, True)
                after = await box.exec(ExecRequest(exec_id=f"e{number}", command="echo on", timeout_s=20.0))
                assert (after.exit_code, after.stdout.text()) == (0, "on\n")
            health = await box.probe()
            assert (health.alive, health.processes) == (True, 0)
        except SandboxError as error:
            if error.phase != "start":
                raise
            pytest.skip(str(error))
        finally:
            await backend.close()

    asyncio.run(run())


def test_who_is_asked_for_by_name_is_known_without_an_entry_in_the_image(tmp_path: Path) -> None:
    """`getpass.getuser()` asks the environment first; an image has no entry for a user that it never had."""
    (result,) = in_a_sandbox(tmp_path, 'python3 -c "import getpass; print(getpass.getuser())"; echo $USER')
    assert result.stdout.text() == ("root\nroot\n" if os.getuid() == 0 else "policy\npolicy\n")


def test_a_workdir_thousands_of_folders_deep_is_the_policys_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    deep = 'python3 -c "import os\nfor _ in range(3000): os.mkdir(chr(100)); os.chdir(chr(100))"; pwd'

    async def look(box: Sandbox) -> None:
        with pytest.raises(DiffTooLarge) as caught:
            await box.diff()
        assert len(str(caught.value)) < 500

    (result,) = in_a_sandbox(tmp_path, deep, then=look)
    assert not Path(result.stdout.text().strip()).exists()
