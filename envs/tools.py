"""Typed tools: plain async functions whose annotations and docstrings are the schema that a model is given.

A tool takes a `Workspace` and its own parameters and returns a `ToolResult`. What the policy gets wrong
(unknown tool, missing argument, wrong type, a text that is not there) is an error result: its own doing. What
the sandbox gets wrong raises a `BoundaryError` and never becomes text. `tool_of` also takes a bound method,
so that an environment written as a class needs nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol, get_type_hints

import pydantic
from pydantic import ConfigDict, Field

from agentrl.errors import ConfigError, nearest
from agentrl.types import ExecStatus, Task
from envs import text
from envs.report import TestRun
from envs.sandbox.contract import OUTPUT_LIMIT_BYTES, ExecRequest, ExecResult, NotRegular

READ_LIMIT_BYTES = 4 * 1024 * 1024
"""Largest file that a tool reads; the model sees far less of it."""
TOOL_SHELL = "tool.bash"
"""The shell of a task that has a persistent one."""
ONE_SHELL = (
    "Run a shell command. Commands share one shell, which starts in the working folder: its folder, variables"
    " and functions are kept."
)
"""What a model is told of `bash` where a task has a persistent shell."""
SHELL_RESTARTED = (
    "[the shell had ended; this ran in a new one, in the folder and with the variables from before that]"
)
TEST_MESSAGE_CHARS = 160
"""Length of one line of a test report."""


class Workspace(Protocol):
    """What a tool may do: the sandbox's own operations, framed and accounted for by the session."""

    @property
    def task(self) -> Task: ...

    def next_exec_id(self) -> str: ...

    async def exec(self, request: ExecRequest) -> ExecResult: ...

    async def read_file(self, path: str, *, max_bytes: int) -> bytes: ...

    async def write_file(self, path: str, data: bytes, *, mode: int | None) -> None: ...

    async def visible_tests(self) -> tuple[str, ...]:
        """Paths of the tests that the policy may see, relative to the workdir."""
        ...

    def submit(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool did. `text` is already the model's view."""

    text: str
    is_error: bool = False
    status: ExecStatus | None = None
    exit_code: int | None = None
    wall_ms: float | None = None
    queue_ms: float | None = None
    truncated_bytes: int = 0
    data: dict[str, Any] = field(default_factory=dict)


def persistent(task: Task) -> bool:
    """Whether the task's commands share one shell: `[metadata.agentrl] shell = "persistent"`."""
    return bool(task.metadata.get("shell") == "persistent")


def failed(message: str) -> ToolResult:
    """The policy's own error, in words that say what to do."""
    return ToolResult(text=message, is_error=True)


# -------------------------------------------------------------------------------------------------- the tools


async def bash(workspace: Workspace, command: str) -> ToolResult:
    """Run a shell command in the working folder.

    command: the command line
    """
    if "\0" in command:
        return failed("Nothing was run: a command can not hold a NUL byte. Use printf '\\0' to make one.")
    if not _is_text(command):
        return failed("Nothing was run: the command is not valid text, it holds a lone surrogate.")
    limits = workspace.task.limits
    result = await workspace.exec(
        ExecRequest(
            exec_id=workspace.next_exec_id(),
            command=command,
            timeout_s=limits.exec_timeout_s,
            shell=TOOL_SHELL if persistent(workspace.task) else None,
        )
    )
    shown, omitted = text.stream_view(result.stdout, result.stderr, limit=limits.observation_bytes)
    note = "\n".join(
        filter(None, (SHELL_RESTARTED * result.shell_restarted, _ending(result, workspace.task)))
    )
    if note:
        shown = f"{shown}\n{note}" if shown and not shown.endswith("\n") else shown + note
    return ToolResult(
        text=shown,
        is_error=result.status is not ExecStatus.EXITED,
        status=result.status,
        exit_code=result.exit_code,
        wall_ms=result.wall_ms,
        queue_ms=result.queue_ms,
        truncated_bytes=omitted,
    )


def _ending(result: ExecResult, task: Task) -> str:
    """How a command ended, when that is not `exit code 0`."""
    match result.status:
        case ExecStatus.EXITED:
            return f"[exit code {result.exit_code}]" if result.exit_code else ""
        case ExecStatus.TIMEOUT:
            return f"[timed out after {task.limits.exec_timeout_s:g} s, all its processes were killed]"
        case ExecStatus.OOM:
            return f"[killed: out of memory, the limit is {task.sandbox.memory_mib} MiB]"
        case ExecStatus.SIGNALED:
            return f"[ended by signal {result.signal}]"
        case _:
            return f"[killed after more than {OUTPUT_LIMIT_BYTES // 2**20} MiB of output]"


async def read_file(workspace: Workspace, path: str) -> ToolResult:
    """Show a file.

    path: the file, relative to the working folder
    """
    raw = await _read(workspace, path)
    if isinstance(raw, ToolResult):
        return raw
    shown, omitted = text.model_view(raw, workspace.task.limits.observation_bytes)
    return ToolResult(text=shown, truncated_bytes=omitted)


def _is_text(given: str) -> bool:
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True


async def _read(workspace: Workspace, path: str) -> bytes | ToolResult:
    if not path or "\0" in path:
        return failed("No such file: an empty path or one with a NUL byte.")
    if not _is_text(path):
        return failed("No such file: the path is not valid text, it holds a lone surrogate.")
    try:
        return await workspace.read_file(path, max_bytes=READ_LIMIT_BYTES)
    except FileNotFoundError:
        return failed(f"No such file: {path}")
    except IsADirectoryError:
        return failed(f"{path} is a directory.")
    except NotADirectoryError:
        return failed(f"A part of {path} is not a directory.")
    except PermissionError:
        return failed(f"No permission for {path}")
    except NotRegular:
        return failed(f"{path} is not a regular file.")
    except ValueError:
        return failed(
            f"{path} is larger than {READ_LIMIT_BYTES // 2**20} MiB; look at a part of it with bash."
        )
    except OSError as error:
        return failed(f"Cannot open {path}: {error.strerror or type(error).__name__}")


async def replace_in_file(workspace: Workspace, path: str, old: str, new: str) -> ToolResult:
    """Replace a text that occurs exactly once in a file.

    path: the file, relative to the working folder
    old: the text to replace
    new: the text to put there
    """
    if not old:
        return failed("old must not be empty.")
    if old == new:
        return failed("old and new are the same. Nothing was changed.")
    raw = await _read(workspace, path)
    if isinstance(raw, ToolResult):
        return raw
    if not _is_text(old) or not _is_text(new):
        return failed("old and new must be valid text, without lone surrogates.")
    before, after = old.encode(), new.encode()
    count = raw.count(before)
    if count != 1:
        return failed(f"old occurs {count} times in {path}, not exactly once. Nothing was changed.")
    try:
        await workspace.write_file(path, raw.replace(before, after), mode=None)
    except PermissionError:
        return failed(f"No permission for {path}. Nothing was changed.")
    except OSError as error:
        return failed(f"Cannot write {path}: {error.strerror or type(error).__name__}. Nothing was changed.")
    shown, omitted = text.model_view(
        _lines_around(raw, before, after), workspace.task.limits.observation_bytes
    )
    return ToolResult(text=f"Replaced in {path}:\n{shown}", truncated_bytes=omitted)


def _lines_around(raw: bytes, before: bytes, after: bytes) -> bytes:
    """The whole lines that a replacement touched, as they are now."""
    at = raw.index(before)
    start = raw.rfind(b"\n", 0, at) + 1
    end = raw.find(b"\n", at + len(before))
    return raw[start:at] + after + raw[at + len(before) : len(raw) if end < 0 else end]


async def run_tests(workspace: Workspace) -> ToolResult:
    """Run the visible tests."""
    files = await workspace.visible_tests()
    if not files:
        return failed("This task has no visible tests.")
    limits = workspace.task.limits
    run = TestRun.of(
        files,
        exec_id=workspace.next_exec_id(),
        timeout_s=limits.exec_timeout_s,
        processes=workspace.task.sandbox.pids,
        grading=False,
    )
    result = await workspace.exec(run.request)
    report = run.parse(result.report)
    if not report.complete:
        shown, omitted = text.stream_view(result.stdout, result.stderr, limit=limits.observation_bytes)
        ending = _ending(result, workspace.task) or "[no report]"
        return ToolResult(
            text=f"The tests did not finish. {ending}\n{shown}",
            is_error=True,
            status=result.status,
            exit_code=result.exit_code,
            wall_ms=result.wall_ms,
            queue_ms=result.queue_ms,
            truncated_bytes=omitted,
        )
    passed = sum(t.outcome == "passed" for t in report.tests)
    lines = [f"ERROR {f.path}: {f.problem}" for f in report.files if f.problem]
    lines += [
        f"{'SKIPPED' if t.outcome == 'skipped' else 'FAILED'} {t.name.partition('::')[2]}: {t.message}"
        for t in report.tests
        if t.outcome != "passed"
    ]
    total = len(report.tests)
    good = passed == total and not lines
    shown, omitted = text.model_view(
        "\n".join(
            [f"{'PASSED' if good and total else 'FAILED'} {passed}/{total}"]
            + [
                line if len(line) <= TEST_MESSAGE_CHARS else line[: TEST_MESSAGE_CHARS - 1] + "…"
                for line in lines
            ]
        ).encode("utf-8", "backslashreplace"),
        limits.observation_bytes,
    )
    return ToolResult(
        text=shown,
        status=result.status,
        exit_code=result.exit_code,
        wall_ms=result.wall_ms,
        queue_ms=result.queue_ms,
        truncated_bytes=omitted,
        data={"passed": passed, "failed": total - passed},
    )


async def submit(workspace: Workspace) -> ToolResult:
    """Hand in the work: it is graded as it is now."""
    workspace.submit()
    return ToolResult(text="Submitted.")


# --------------------------------------------------------------------------------- from functions to schemas


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function, its name and schema, and a strict model of its arguments."""

    name: str
    description: str
    function: Callable[..., Awaitable[ToolResult]]
    arguments: type[pydantic.BaseModel]

    def schema(self) -> dict[str, Any]:
        """OpenAI function schema."""
        parameters = _plain(self.arguments.model_json_schema())
        parameters.setdefault("required", [])
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    async def call(self, workspace: Workspace, arguments: Mapping[str, Any]) -> ToolResult:
        """Check the arguments, run. Raises only what the sandbox raises."""
        try:
            checked = self.arguments.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            return failed(f"{self.name}: {_first_problem(error, self.arguments)}")
        return await self.function(workspace, **{n: getattr(checked, n) for n in self.arguments.model_fields})


def tool_of(function: Callable[..., Awaitable[ToolResult]]) -> Tool:
    """A tool from an async function or bound method whose first parameter is the workspace.

    Raises `ConfigError` when it is not async, lacks a docstring, or a parameter has no annotation.
    """
    name = function.__name__
    doc = inspect.getdoc(function)
    if not inspect.iscoroutinefunction(function) or not doc:
        raise ConfigError(
            f"Tool {name}: needs `async def` and a docstring.", fix="The docstring is its description."
        )
    description, _, rest = doc.partition("\n")
    words = dict(line.split(":", 1) for line in rest.splitlines() if ":" in line)
    about = {key.strip(): value.strip() for key, value in words.items()}
    hints = get_type_hints(function)
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.name not in hints:
            raise ConfigError(
                f"Tool {name}: parameter {parameter.name} has no annotation.", fix="Give it a type."
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (
            hints[parameter.name],
            Field(default, description=about.get(parameter.name)),
        )
    model = pydantic.create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)
    return Tool(name=name, description=description.strip(), function=function, arguments=model)


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """A pydantic schema without the titles that only cost tokens."""
    kept = {key: value for key, value in schema.items() if key != "title"}
    if "properties" in kept:
        kept["properties"] = {
            name: {k: v for k, v in field_.items() if k != "title"}
            for name, field_ in kept["properties"].items()
        }
    return kept


def _first_problem(error: pydantic.ValidationError, model: type[pydantic.BaseModel]) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "missing":
            return f"the argument {where} is missing."
        case "extra_forbidden":
            return f"unknown argument {where}. {nearest(where, model.model_fields)}"
        case _:
            return f"argument {where}: {first['msg']}."


BUILTIN: Mapping[str, Tool] = MappingProxyType(
    {f.__name__: tool_of(f) for f in (bash, read_file, replace_in_file, run_tests, submit)}
)
"""The tools that every task may name."""
REPEATABLE = frozenset({"bash", "read_file", "submit"})
"""Tools that may be performed from the beginning when nobody knows how far they came: their commands have the
same ids again, so a sandbox answers from memory, and they change nothing else."""


def get(name: str) -> Tool:
    """A built-in tool; `ConfigError` names the nearest one."""
    if name not in BUILTIN:
        raise ConfigError(f"Unknown tool '{name}'.", fix=nearest(name, BUILTIN))
    return BUILTIN[name]


@cache
def _schemas(names: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    return tuple(get(name).schema() for name in names)


def tool_schemas(names: Iterable[str], *, persistent_shell: bool = False) -> list[dict[str, Any]]:
    """OpenAI function schemas of the named tools, in that order. With a persistent shell `bash` says that its
    commands share one."""
    schemas = list(_schemas(tuple(names)))
    if persistent_shell:
        schemas = [_of_one_shell(schema) for schema in schemas]
    return schemas


def _of_one_shell(schema: dict[str, Any]) -> dict[str, Any]:
    function = schema["function"]
    if function["name"] != bash.__name__:
        return schema
    return {**schema, "function": {**function, "description": ONE_SHELL}}
