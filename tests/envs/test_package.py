"""Task packages: what is read, what is refused, what is kept."""

import os
from pathlib import Path

import pytest
import tomlkit
from faulty_backend import config, small_task

from agentrl.errors import TaskError
from agentrl.types import Split, Task
from envs.tasks import package

HARBOR = """\
# a comment of the author
schema_version = "1.2"
x_future = "kept"

[task]
name = "org/thing"   # spaced

[environment]
docker_image = "debian:12"
allow_internet = true
memory = "2G"
storage_mb = 10240
cpus = 2

[agent]
timeout_sec = 77.0

[verifier]
environment_mode = "shared"
odd = { a = 1, b = [1, 2] }

[metadata]
author = "someone"

[metadata.agentrl]
split = "heldout"
difficulty = 0.5
pids_limit = 9
max_turns = 3
tools = ["bash", "submit"]
own_note = "x"
"""


def harbor(folder: Path, text: str = HARBOR) -> Path:
    return package.write_task(
        folder,
        config=tomlkit.parse(text),
        instruction="Do it.\n",
        environment={"Dockerfile": "FROM debian:12\n"},
        tests={"test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"},
        solution="#!/bin/bash\n",
    )


def test_unknown_keys_comments_and_layout_survive_a_round_trip(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "a")
    written = (folder / "task.toml").read_text()
    assert written == HARBOR
    again = harbor(tmp_path / "b", written)
    assert package.revision_of(folder) == package.revision_of(again)


def test_a_harbor_package_becomes_a_task(tmp_path: Path) -> None:
    task = package.load_task(harbor(tmp_path / "a"))
    assert (task.id, task.split, task.difficulty) == ("org/thing", Split.HELDOUT, 0.5)
    assert (task.sandbox.image, task.sandbox.network) == ("debian:12", "public")
    assert (task.sandbox.memory_mib, task.sandbox.disk_mib, task.sandbox.cpus) == (2048, 10240, 2.0)
    assert (task.sandbox.pids, task.limits.max_turns, task.limits.wall_s) == (9, 3, 77.0)
    assert task.tools == ("bash", "submit")
    assert task.grader.kind == "script"
    assert task.metadata == {
        "author": "someone",
        "own_note": "x",
        "defaults": [],
        "shared_verifier_ignored": True,
    }


def test_a_silent_package_gets_no_network_and_a_separate_verifier_and_says_so(task: Task) -> None:
    assert task.sandbox.network == "none"
    assert {"environment.network_mode", "verifier.environment_mode"} <= set(task.metadata["defaults"])
    assert task.sandbox.image == f"dir:{package.revision_of(Path(task.path) / 'environment')}"


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3", "1.4"])
def test_known_schema_versions_load(tmp_path: Path, version: str) -> None:
    package.load_task(harbor(tmp_path / "a", HARBOR.replace('"1.2"', f'"{version}"')))


@pytest.mark.parametrize(
    ("find", "put", "key", "fix"),
    [
        ('"1.2"', '"2.0"', "schema_version", "1.4"),
        ("allow_internet = true", 'network_mode = "no-net"', "environment.network_mode", "no-network"),
        ("allow_internet = true", 'allow_internet = "yes"', "environment.allow_internet", "bool"),
        ('memory = "2G"', 'memory = "lots"', "environment.memory", "memory_mb"),
        ("cpus = 2", "cpus = -2", "cpus", "greater than 0"),
        ("pids_limit = 9", "pids_limit = true", "metadata.agentrl.pids_limit", "int"),
        ('split = "heldout"', 'split = "test"', "metadata.agentrl.split", "heldout"),
        ("max_turns = 3", 'shell = "persistant"', "metadata.agentrl.shell", "persistent"),
        ('["bash", "submit"]', '["bsh"]', "metadata.agentrl.tools", "'bash'"),
        ('["bash", "submit"]', "[1]", "metadata.agentrl.tools", "list of strings"),
        (
            "max_turns = 3",
            'fail_to_pass = ["nope.py::test_a"]',
            "metadata.agentrl.fail_to_pass",
            "<file>::<test>",
        ),
        ("max_turns = 3", 'grader = "tests"', "metadata.agentrl.fail_to_pass", "test_x.py::test_y"),
        ('"org/thing"', '"thing"', "id", "pattern"),
        ("[verifier]", "[[steps]]\nname = 'a'\n[verifier]", "steps", "one task per step"),
        ("[verifier]", "[verifier", "syntax", "TOML"),
        ("[verifier]", "[verifier]\nx = " + "[" * 5000 + "]" * 5000, "syntax", "nested"),
        ("timeout_sec = 77.0", "timeout_sec = nan", "wall_s", "finite"),
        ("timeout_sec = 77.0", "timeout_sec = -1", "wall_s", "greater than 0"),
        ("timeout_sec = 77.0", "timeout_sec = 1" + "0" * 400, "number", "too large"),
        ("cpus = 2", 'cpus = 2\nenv = { "A=B" = "1" }', "environment.env", "'A=B'"),
        ("cpus = 2", 'cpus = 2\nenv = { A = "1\\u0000" }', "environment.env", "NUL"),
        ("cpus = 2", "cpus = 2\nenv = { A = 1 }", "env", "string"),
        (
            "max_turns = 3",
            'fail_to_pass = ["../tests/test.sh::test_a"]',
            "metadata.agentrl.fail_to_pass",
            "<file>::<test>",
        ),
    ],
)
def test_a_bad_value_names_file_key_and_fix(tmp_path: Path, find: str, put: str, key: str, fix: str) -> None:
    folder = harbor(tmp_path / "a")
    file = folder / "task.toml"
    file.write_text(HARBOR.replace(find, put))
    with pytest.raises(TaskError) as caught:
        package.load_task(folder)
    message = str(caught.value)
    assert str(file) in message
    assert key in message
    assert fix in message
    assert caught.value.owner == "task"


def test_text_that_is_not_utf8_is_named_with_its_file(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "a")
    (folder / "instruction.md").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match=r"instruction\.md: encoding"):
        package.load_task(folder)


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = harbor(tmp_path / "a")
    (folder / missing).unlink()
    with pytest.raises(TaskError, match=missing):
        package.load_task(folder)


def test_the_revision_follows_names_bytes_and_the_executable_bit_but_not_the_umask(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "a")
    script = folder / "tests/test.sh"
    first = package.revision_of(folder)
    script.chmod(0o775)
    assert package.revision_of(folder) == first
    script.chmod(0o644)
    changed = {first, package.revision_of(folder)}
    script.write_text("#!/bin/bash\n")
    changed.add(package.revision_of(folder))
    script.rename(folder / "tests/other.sh")
    changed.add(package.revision_of(folder))
    os.symlink("other.sh", folder / "tests/test.sh")
    changed.add(package.revision_of(folder))
    assert len(changed) == 5


def test_a_suite_is_sorted_and_two_equal_ids_are_refused(tmp_path: Path) -> None:
    small_task(tmp_path / "s" / "b")
    harbor(tmp_path / "s" / "a")
    assert [t.id for t in package.load_suite(tmp_path / "s")] == ["org/thing", "small/cart"]
    small_task(tmp_path / "s" / "c")
    with pytest.raises(TaskError, match="small/cart"):
        package.load_suite(tmp_path / "s")
    with pytest.raises(TaskError, match="no task package"):
        package.load_suite(tmp_path / "s" / "b" / "tests")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    small_task(tmp_path / "a")
    with pytest.raises(TaskError, match="not empty"):
        package.write_task(
            tmp_path / "a", config=config(), instruction="", environment={}, tests={}, solution=""
        )
