"""Harbor task packages on disk to `Task` records and back.

    task.toml  instruction.md  environment/  solution/solve.sh  tests/{test.sh, test files}

Schema versions 1.0 to 1.4 are read. Unknown keys are kept verbatim; ours live under `[metadata.agentrl]`, so
the package stays valid for every other reader. `environment/` is the workdir's content; a Docker image may be
named instead. Where the file is silent the network is off and grading happens in a separate sandbox, unlike
Harbor's own defaults; `Task.metadata["defaults"]` lists the keys that were ours. Nothing is executed here.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pydantic
import tomlkit

from agentrl.errors import ConfigError, TaskError, nearest
from agentrl.types import GraderSpec, GraderUse, Limits, SandboxSpec, Split, Task, content_hash
from envs import tools
from envs.graders import registry as graders

SCHEMA_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
CLOCK_SINCE_S, CLOCK_BEFORE_S = 315_532_800.0, 2_145_916_800.0
"""A task's clock stands between 1980 (archives know no earlier time) and 2038 (32-bit programs know no
later)."""
DEFAULT_TOOLS = ("bash", "read_file", "replace_in_file", "run_tests", "submit")

_OURS = MappingProxyType(
    {
        "split": str,
        "difficulty": (int, float),
        "tools": list,
        "visible_tests": list,
        "grader": str,
        "fail_to_pass": list,
        "pass_to_pass": list,
        "protected_paths": list,
        "pids_limit": int,
        "max_turns": int,
        "max_tokens": int,
        "max_context": int,
        "exec_timeout_s": (int, float),
        "observation_bytes": int,
        "shell": str,
        "clock": (str, datetime),
    }
)
"""Keys of `[metadata.agentrl]` that mean something here, with their TOML type. Others are kept as
metadata."""
_SHELLS = ("one-shot", "persistent")
"""Where the commands of the `bash` tool run: each in a shell of its own, or in one after the other."""
_TABLES = ("graders",)
"""Keys of it that hold tables."""
_LIMIT_KEYS = ("max_turns", "max_tokens", "max_context", "exec_timeout_s", "observation_bytes")
_NETWORKS = MappingProxyType({"no-network": "none", "allowlist": "allowlist", "public": "public"})
_SIZES = MappingProxyType({"": 1, "M": 1, "MB": 1, "MIB": 1, "G": 1024, "GB": 1024, "GIB": 1024})


def _error(file: Path, key: str, what: str, fix: str) -> TaskError:
    return TaskError(f"{file}: {key}: {what}", fix=fix, phase="load", code="task_package")


# -------------------------------------------------------------------------------------------- content hashes


def entries(root: Path) -> list[tuple[str, str, bytes]]:
    """`(relative path, mode, bytes)` of every file and link below `root`, sorted. Modes are as git keeps
    them."""
    found = []
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in (*files, *links):
            path = os.path.join(folder, name)
            info = os.lstat(path)
            relative = os.path.relpath(path, root)
            if stat.S_ISLNK(info.st_mode):
                found.append((relative, "120000", os.fsencode(os.readlink(path))))
            elif stat.S_ISREG(info.st_mode):
                mode = "100755" if info.st_mode & 0o111 else "100644"
                with open(path, "rb") as file:
                    found.append((relative, mode, file.read()))
            else:
                raise _error(Path(path), "type", "neither a file nor a link", "Remove it from the package.")
    return sorted(found)


def revision_of(path: Path) -> str:
    """sha256 over relative paths, modes and bytes of a folder."""
    return content_hash(*(part for p, m, raw in entries(path) for part in (os.fsencode(p), m.encode(), raw)))


def test_files(path: Path) -> dict[str, str]:
    """sha256 of each regular file under the package's `tests/`, by its path relative to there."""
    return {
        relative: hashlib.sha256(raw).hexdigest()
        for relative, mode, raw in entries(path / "tests")
        if mode != "120000"
    }


test_files.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever its name says to a collector


# --------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class _Table:
    """A TOML table that knows where it is, for messages."""

    file: Path
    name: str
    values: Mapping[str, Any]

    def child(self, key: str) -> _Table:
        return _Table(self.file, f"{self.name}.{key}" if self.name else key, self.get(key, dict, {}))

    def get(self, key: str, kind: Any, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is default:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
        if wrong or (isinstance(value, list) and not all(isinstance(item, str) for item in value)):
            wanted = " or ".join(k.__name__ for k in kinds) + (" of strings" if list in kinds else "")
            raise self.error(key, f"is {type(value).__name__}, not {wanted}", f"Write a {wanted}.")
        return value

    def error(self, key: str, what: str, fix: str) -> TaskError:
        return _error(self.file, f"{self.name}.{key}" if self.name else key, what, fix)


def _mebibytes(table: _Table, key: str, old_key: str, default: int) -> int:
    size: int = table.get(key, int, 0)
    if key in table.values:
        return size
    text = str(table.values.get(old_key, ""))
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text)
    if not text:
        return default
    if match is None or match[2].upper() not in _SIZES:
        raise table.error(old_key, f"'{text}' is not a size", f"Use {key} = <number of MiB>.")
    return int(match[1]) * _SIZES[match[2].upper()]


def _network(table: _Table) -> str:
    if "network_mode" in table.values:
        mode = table.get("network_mode", str, "")
        if mode not in _NETWORKS:
            raise table.error("network_mode", f"unknown mode '{mode}'", nearest(mode, _NETWORKS))
        return _NETWORKS[mode]
    return "public" if table.get("allow_internet", bool, False) else "none"


def load_task(path: str | Path) -> Task:
    """Read one package. `TaskError` names file, key and fix."""
    folder = Path(path).resolve()
    file = folder / "task.toml"
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _error(file, "file", "is missing", "A task package is a folder with a task.toml.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _error(file, "syntax", str(error), "Correct the TOML there.") from error
    except RecursionError as error:
        raise _error(file, "syntax", "is nested too deeply", "Nest less.") from error
    root = _Table(file, "", document)
    version = str(document.get("schema_version", document.get("version", "1.0")))
    if version not in SCHEMA_VERSIONS:
        raise root.error(
            "schema_version", f"'{version}' is not known", f"Known: {', '.join(SCHEMA_VERSIONS)}."
        )
    if "steps" in document:
        raise root.error(
            "steps",
            "a package of several steps has several instructions and verdicts, and a session has one of each",
            "Write one task per step, its environment as the steps before leave it.",
        )
    environment, verifier = root.child("environment"), root.child("verifier")
    ours = root.child("metadata").child("agentrl")
    known = {key: ours.get(key, kind, None) for key, kind in _OURS.items()}
    instruction = folder / "instruction.md"
    if not instruction.is_file():
        raise _error(instruction, "file", "is missing", "Say there what is to be done.")
    if not (folder / "environment").is_dir() and "docker_image" not in environment.values:
        raise _error(
            folder / "environment", "folder", "is missing", "Add it, or set environment.docker_image."
        )
    names = tuple(known["tools"] or DEFAULT_TOOLS)
    for name in names:
        try:
            tools.get(name)
        except ConfigError as error:
            raise ours.error("tools", error.message, error.fix or "") from error
    defaults = [
        key
        for key, table, there in (
            ("environment.network_mode", environment, ("network_mode", "allow_internet")),
            ("verifier.environment_mode", verifier, ("environment_mode",)),
            ("environment.memory_mb", environment, ("memory_mb", "memory")),
            ("environment.cpus", environment, ("cpus",)),
            ("environment.storage_mb", environment, ("storage_mb", "storage")),
        )
        if not any(name in table.values for name in there)
    ]
    clock = _clock(ours, known["clock"])
    limits = {key: known[key] for key in _LIMIT_KEYS if known[key] is not None}
    metadata = {key: value for key, value in document.get("metadata", {}).items() if key != "agentrl"}
    metadata |= {key: value for key, value in ours.values.items() if key not in (*_OURS, *_TABLES)}
    metadata |= {"defaults": defaults}
    if known["shell"] not in (None, *_SHELLS):
        raise ours.error("shell", f"unknown kind '{known['shell']}'", nearest(known["shell"], _SHELLS))
    if known["shell"] == "persistent":
        metadata |= {"shell": known["shell"]}
    if known["visible_tests"]:
        metadata |= {"visible_tests": known["visible_tests"]}
    if verifier.get("environment_mode", str, "separate") == "shared":
        metadata |= {"shared_verifier_ignored": True}
    try:
        return Task(
            id=root.child("task").get("name", str, f"{folder.parent.name}/{folder.name}"),
            revision=revision_of(folder),
            path=str(folder),
            instruction=_text(instruction),
            sandbox=_sandbox(folder, environment, known["pids_limit"]),
            tools=names,
            grader=_grader(folder, ours, verifier, known),
            limits=Limits(
                wall_s=float(root.child("agent").get("timeout_sec", (int, float), 1800.0)), **limits
            ),
            clock=clock,
            split=Split(known["split"] or Split.TRAIN),
            difficulty=known["difficulty"],
            metadata=metadata,
        )
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _error(file, where, first["msg"], "Correct that value.") from error
    except OverflowError as error:
        raise _error(file, "number", str(error), "Use a number that a machine can hold.") from error
    except ValueError as error:
        raise ours.error("split", str(error), f"Known: {', '.join(Split)}.") from error


def _clock(ours: _Table, value: str | datetime | None) -> datetime | None:
    """The time that a task's clock starts at: with its zone, and one that programs can be told of."""
    if value is None:
        return None
    fix = 'Write the time with its zone: clock = "2024-05-01T00:00:00Z".'
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else value
        if found.tzinfo is None:
            raise ours.error("clock", f"'{value}' has no zone", fix)
        seconds = found.timestamp()
    except (ValueError, OverflowError) as error:
        raise ours.error("clock", f"'{value}' is no time", fix) from error
    if not CLOCK_SINCE_S <= seconds < CLOCK_BEFORE_S:
        raise ours.error("clock", f"'{value}' is too far away", "Name a time from 1980 to 2037.")
    return found.astimezone(UTC)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _error(file, "encoding", str(error), "Write it as UTF-8.") from error


def _sandbox(folder: Path, environment: _Table, pids: int | None) -> SandboxSpec:
    values: dict[str, Any] = {"network": _network(environment), "env": environment.get("env", dict, {})}
    for name, value in values["env"].items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in str(value):
            raise environment.error(
                "env", f"{name!r:.80} can not be a variable", "Use letters, digits and _, and no NUL byte."
            )
    values["image"] = environment.get("docker_image", str, "")
    if not values["image"]:
        values["image"] = f"dir:{revision_of(folder / 'environment')}"
    values["memory_mib"] = _mebibytes(environment, "memory_mb", "memory", 1024)
    values["disk_mib"] = _mebibytes(environment, "storage_mb", "storage", 256)
    values["cpus"] = float(environment.get("cpus", (int, float), 1.0))
    values["workdir"] = environment.get("workdir", str, "/app")
    if pids is not None:
        values["pids"] = pids
    return SandboxSpec(**values)


def _grader(folder: Path, ours: _Table, verifier: _Table, known: Mapping[str, Any]) -> GraderSpec:
    uses: tuple[GraderUse, ...] = ()
    kind: Any = known["grader"] or ("tests" if known["fail_to_pass"] else "script")
    fails, passes = (tuple(known[key] or ()) for key in ("fail_to_pass", "pass_to_pass"))
    tests = folder / "tests"
    if kind == "tests":
        if not fails:
            raise ours.error(
                "fail_to_pass",
                "is empty",
                "Name the tests that the solution makes pass: 'test_x.py::test_y'.",
            )
        for name in (*fails, *passes):
            head, mark, _ = name.partition("::")
            if not mark or ".." in head.split("/") or not (tests / head).is_file():
                key = "fail_to_pass" if name in fails else "pass_to_pass"
                raise ours.error(key, f"'{name}' names no file under tests/", "Write '<file>::<test>'.")
    elif kind == "graders":
        uses = _uses(ours)
    elif not (tests / "test.sh").is_file():
        raise _error(
            tests / "test.sh", "file", "is missing", "Add it, or name fail_to_pass under [metadata.agentrl]."
        )
    return GraderSpec(
        kind=kind,
        fail_to_pass=fails,
        pass_to_pass=passes,
        protected_paths=tuple(known["protected_paths"] or ()),
        graders=uses,
        timeout_s=float(verifier.get("timeout_sec", (int, float), 600.0)),
    )


def _uses(ours: _Table) -> tuple[GraderUse, ...]:
    """`[[metadata.agentrl.graders]]`, each made once to see that it takes its options."""
    found = ours.values.get("graders")
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise ours.error(
            "graders", "is missing", "Add [[metadata.agentrl.graders]] with name, use, weight and options."
        )
    uses, decides = [], False
    for each in found:
        try:
            use = GraderUse(**each)
            decides |= graders.make(use).decides
        except (pydantic.ValidationError, TypeError) as error:
            raise ours.error("graders", str(error).replace("\n", " "), "Correct that grader.") from error
        except TaskError as error:
            raise ours.error("graders", error.message, error.fix or "") from error
        uses.append(use)
    if len({use.name for use in uses}) < len(uses):
        raise ours.error("graders", "has a name twice", "Give every grader a name of its own.")
    if not decides:
        raise ours.error(
            "graders", "has none that decides", "Add one whose value is 1 for a solution, such as tests."
        )
    return tuple(uses)


def load_suite(root: str | Path) -> tuple[Task, ...]:
    """All packages below a folder, sorted by path. `TaskError` when there is none or two share an id."""
    folder = Path(root).resolve()
    found = sorted(file.parent for file in folder.rglob("task.toml"))
    if not found:
        raise _error(
            folder, "folder", "holds no task package", "Give a folder with task.toml files below it."
        )
    suite = tuple(load_task(path) for path in found)
    first: dict[str, Task] = {}
    for task in suite:
        other = first.setdefault(task.id, task)
        if other is not task:
            raise _error(
                Path(task.path) / "task.toml", "task.name", f"'{task.id}' is also {other.path}", "Rename one."
            )
    return suite


# --------------------------------------------------------------------------------------------------- writing


def write_task(
    path: str | Path,
    *,
    config: Mapping[str, Any],
    instruction: str,
    environment: Mapping[str, str | bytes],
    tests: Mapping[str, str | bytes],
    solution: str,
) -> Path:
    """Write a package: `config` is the task.toml as nested tables, the rest are file contents by relative
    path.

    Files that start with `#!` become executable. A `tomlkit` document as `config` is written verbatim,
    comments and unknown keys included. The folder must not exist or be empty.
    """
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()):
        raise _error(folder, "folder", "is not empty", "Give a new folder.")
    files = {
        "task.toml": tomlkit.dumps(config),
        "instruction.md": instruction,
        "solution/solve.sh": solution,
        **{f"environment/{name}": content for name, content in environment.items()},
        **{f"tests/{name}": content for name, content in tests.items()},
    }
    made: set[str] = set()
    for name, content in files.items():
        target = os.path.join(folder, name)
        parent = os.path.dirname(target)
        if parent not in made:
            os.makedirs(parent, exist_ok=True)
            made.add(parent)
        raw = content.encode() if isinstance(content, str) else content
        with open(target, "wb") as file:
            file.write(raw)
            os.fchmod(file.fileno(), 0o755 if raw.startswith(b"#!") else 0o644)
    return folder
