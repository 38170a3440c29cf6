"""Typed tools: schemas from functions, mistakes of the policy as observations, faults as exceptions."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from faulty_backend import KEY, Faults, FaultyBackend, small_task

from agentrl.errors import BoundaryError, ConfigError, ExecUnknown, SandboxLost
from agentrl.types import Action, ExecStatus, Observation, Task
from envs import tools
from envs.session import Session
from envs.tools import ToolResult, Workspace, tool_of, tool_schemas


def act(task: Task, *actions: tuple[str, Any], faults: tuple[Faults, ...] = ()) -> list[Observation]:
    async def run() -> list[Observation]:
        backend = FaultyBackend(*faults)
        try:
            async with await Session.open(
                task, backend, session_id="agent", signing_key=KEY, admission=None
            ) as session:
                return [
                    await session.call(Action(id=str(n), tool=tool, arguments=arguments))
                    for n, (tool, arguments) in enumerate(actions)
                ]
        finally:
            await backend.close()

    return asyncio.run(run())


def test_a_schema_is_made_from_annotations_and_docstring() -> None:
    assert tool_schemas(["replace_in_file", "submit"]) == [
        {
            "type": "function",
            "function": {
                "name": "replace_in_file",
                "description": "Replace a text that occurs exactly once in a file.",
                "parameters": {
                    "additionalProperties": False,
                    "type": "object",
                    "properties": {
                        "path": {"type": "string", "description": "the file, relative to the working folder"},
                        "old": {"type": "string", "description": "the text to replace"},
                        "new": {"type": "string", "description": "the text to put there"},
                    },
                    "required": ["path", "old", "new"],
                },
            },
        },
        {
            "type": "function",
            "function": {
                "name": "submit",
                "description": "Hand in the work: it is graded as it is now.",
                "parameters": {
                    "additionalProperties": False,
                    "type": "object",
                    "properties": {},
                    "required": [],
                },
            },
        },
    ]


def test_a_method_with_defaults_and_choices_is_a_tool() -> None:
    class Desk:
        async def lamp(
            self, workspace: Workspace, level: Literal["low", "high"], times: int = 1
        ) -> ToolResult:
            """Set the lamp."""
            return ToolResult(text=f"{level} {times}")

    tool = tool_of(Desk().lamp)
    parameters = tool.schema()["function"]["parameters"]
    assert parameters["required"] == ["level"]
    assert parameters["properties"]["level"]["enum"] == ["low", "high"]
    assert asyncio.run(tool.call(None, {"level": "low"})).text == "low 1"  # type: ignore[arg-type]
    assert asyncio.run(tool.call(None, {"level": "off"})).is_error  # type: ignore[arg-type]


def test_a_function_that_is_no_tool_is_refused_with_its_name() -> None:
    async def bare(workspace: Workspace, x) -> ToolResult:  # type: ignore[no-untyped-def]
        """Do."""
        return ToolResult(text="")

    async def silent(workspace: Workspace) -> ToolResult:
        return ToolResult(text="")

    with pytest.raises(ConfigError, match="parameter x"):
        tool_of(bare)
    with pytest.raises(ConfigError, match="silent"):
        tool_of(silent)
    with pytest.raises(ConfigError, match="'bash'"):
        tools.get("bahs")


@pytest.mark.parametrize(
    ("tool", "arguments", "says"),
    [
        ("bsh", {}, "Unknown tool 'bsh'. Did you mean 'bash'?"),
        ("bash", {}, "bash: the argument command is missing."),
        ("bash", {"command": 5}, "bash: argument command: Input should be a valid string."),
        ("bash", {"command": "x", "cmd": 1}, "bash: unknown argument cmd. Did you mean 'command'?"),
        ("read_file", {"path": "nope.py"}, "No such file: nope.py"),
        ("read_file", {"path": "tests"}, "tests is a directory."),
        (
            "bash",
            {"command": "echo a\0b"},
            "Nothing was run: a command can not hold a NUL byte. Use printf '\\0' to make one.",
        ),
        ("read_file", {"path": "cart\0.py"}, "No such file: an empty path or one with a NUL byte."),
        ("read_file", {"path": "n" * 300}, "Cannot open " + "n" * 300 + ": File name too long"),
        (
            "bash",
            {"command": "echo \ud800"},
            "Nothing was run: the command is not valid text, it holds a lone surrogate.",
        ),
        (
            "read_file",
            {"path": "\ud800"},
            "No such file: the path is not valid text, it holds a lone surrogate.",
        ),
        ("bash\ud800", {}, "Unknown tool 'bash\\ud800'. Did you mean 'bash'?"),
        ("read_file", {"path": ""}, "No such file: an empty path or one with a NUL byte."),
        (
            "replace_in_file",
            {"path": "cart.py", "old": "a", "new": "x"},
            "old occurs 5 times in cart.py, not exactly once. Nothing was changed.",
        ),
        (
            "replace_in_file",
            {"path": "cart.py", "old": "zzz", "new": ""},
            "old occurs 0 times in cart.py, not exactly once. Nothing was changed.",
        ),
        ("replace_in_file", {"path": "cart.py", "old": "", "new": ""}, "old must not be empty."),
        (
            "replace_in_file",
            {"path": "cart.py", "old": "a - b", "new": "a - b"},
            "old and new are the same. Nothing was changed.",
        ),
    ],
)
def test_a_mistake_of_the_policy_is_an_observation(task: Task, tool: str, arguments: Any, says: str) -> None:
    (seen,) = act(task, (tool, arguments))
    assert seen.text == says
    assert seen.is_error


def test_what_has_no_content_of_its_own_is_not_read(task: Task) -> None:
    _, seen = act(task, ("bash", {"command": "mkfifo pipe"}), ("read_file", {"path": "pipe"}))
    assert (seen.text, seen.is_error) == ("pipe is not a regular file.", True)


def test_a_format_error_is_shown_and_nothing_runs(task: Task) -> None:
    async def run() -> Observation:
        backend = FaultyBackend()
        try:
            async with await Session.open(
                task, backend, session_id="agent", signing_key=KEY, admission=None
            ) as session:
                return await session.call(Action(id="0", tool="bash", error="No tool call was found."))
        finally:
            await backend.close()

    assert asyncio.run(run()).text == "No tool call was found."


def test_replacing_keeps_the_mode_and_the_other_bytes(tmp_path: Path) -> None:
    task = small_task(tmp_path / "t", environment={"run.sh": "#!/bin/sh\necho \xe9 one\n"})
    seen = act(
        task,
        ("replace_in_file", {"path": "run.sh", "old": "one", "new": "two"}),
        ("bash", {"command": "stat -c %a run.sh; ./run.sh"}),
    )
    assert seen[0].text == "Replaced in run.sh:\necho é two"
    assert seen[1].text == "755\né two\n"


def test_tests_are_reported_in_short_stable_lines(task: Task) -> None:
    fix = {"path": "cart.py", "old": "a - b", "new": "a + b"}
    seen = act(task, ("run_tests", {}), ("replace_in_file", fix), ("run_tests", {}))
    assert seen[0].text == "FAILED 1/2\nFAILED test_total: -1 != 5"
    assert seen[0].data == {"passed": 1, "failed": 1}
    assert seen[2].text == "PASSED 2/2"


def test_a_broken_module_fails_every_test_with_its_reason(task: Task) -> None:
    broken = {"path": "cart.py", "old": "return a - b", "new": "return a -"}
    (_, seen) = act(task, ("replace_in_file", broken), ("run_tests", {}))
    assert seen.text.splitlines()[0] == "FAILED 0/2"
    assert seen.text.count("SyntaxError") == 2


def test_a_hung_test_is_reported_in_time(tmp_path: Path) -> None:
    task = small_task(tmp_path / "t", exec_timeout_s=0.5)
    hang = {"path": "cart.py", "old": "return a - b", "new": "while True: pass"}
    (_, seen) = act(task, ("replace_in_file", hang), ("run_tests", {}))
    assert (
        seen.text
        == "FAILED 0/2\nFAILED test_total: did not finish in time\nFAILED test_zero: did not finish in time"
    )


def test_a_command_that_fails_or_times_out_says_so(tmp_path: Path) -> None:
    task = small_task(tmp_path / "t", exec_timeout_s=0.5)
    seen = act(
        task,
        ("bash", {"command": "echo out; echo err >&2; exit 3"}),
        ("bash", {"command": "echo begun; sleep 30"}),
        ("bash", {"command": "kill -9 $$"}),
        ("bash", {"command": "echo alive"}),
    )
    assert (seen[0].text, seen[0].exit_code, seen[0].is_error) == ("out\nerr\n[exit code 3]", 3, False)
    assert seen[1].text == "begun\n[timed out after 0.5 s, all its processes were killed]"
    assert (seen[1].status, seen[1].is_error) == (ExecStatus.TIMEOUT, True)
    assert seen[2].text == "[ended by signal 9]"
    assert seen[3].text == "alive\n"


def test_commands_share_a_shell_where_the_task_asks_for_one_and_a_new_one_says_so(tmp_path: Path) -> None:
    moved, stopped = {"command": "cd tests && WORD=kept"}, {"command": "WORD=lost; exit 3"}
    look = {"command": 'echo "${WORD-none} $(basename "$PWD")"'}
    alike = [("bash", moved), ("bash", look), ("bash", stopped), ("bash", look), ("bash", look)]
    shared = small_task(tmp_path / "shared", shell="persistent", exec_timeout_s=20)
    note = tools.SHELL_RESTARTED
    texts = [seen.text for seen in act(shared, *alike)]
    assert texts == ["", "kept tests\n", "[exit code 3]", f"kept tests\n{note}", "kept tests\n"]
    alone = small_task(tmp_path / "alone", shell="one-shot", exec_timeout_s=20)
    first, then, *_ = (seen.text for seen in act(alone, *alike[:2]))
    assert (first, then) == ("", "none work\n")


def test_a_model_is_told_that_commands_share_a_shell_only_where_they_do() -> None:
    apart, shared = (tool_schemas(["bash", "submit"], persistent_shell=each) for each in (False, True))
    assert shared[1] == apart[1]
    assert "share one shell" in shared[0]["function"]["description"]
    assert "share" not in apart[0]["function"]["description"]
    assert shared[0]["function"]["parameters"] == apart[0]["function"]["parameters"]


def test_a_marker_in_the_output_submits_nothing(task: Task) -> None:
    """Submitting is a tool call (ENV-08): no text of a command can be mistaken for it."""
    seen = act(
        task,
        ("bash", {"command": "echo submit; echo COMPLETE_TASK_AND_SUBMIT"}),
        ("bash", {"command": "echo on"}),
    )
    assert seen[1].text == "on\n"
    after = act(task, ("submit", {}), ("bash", {"command": "echo on"}))
    assert after[0].text == "Submitted."
    assert after[1].is_error


@pytest.mark.parametrize(
    "tool", [("bash", {"command": "true"}), ("read_file", {"path": "cart.py"}), ("run_tests", {})]
)
def test_a_lost_sandbox_is_never_an_observation(task: Task, tool: tuple[str, Any]) -> None:
    async def lose(name: str) -> None:
        if name in ("exec", "read_file"):
            raise SandboxLost("gone")

    with pytest.raises(SandboxLost) as caught:
        act(task, tool, faults=(Faults(where="agent", before=lose),))
    assert caught.value.owner == "environment"


def test_an_unknown_outcome_is_never_an_observation(task: Task) -> None:
    for change in ({"status": ExecStatus.UNKNOWN}, {"status": ExecStatus.KILLED, "reason": "orphaned"}):
        faults = Faults(where="agent", result=lambda r, c=change: replace(r, exit_code=None, **c))  # type: ignore[misc]
        with pytest.raises(ExecUnknown):
            act(task, ("bash", {"command": "true"}), faults=(faults,))


def test_a_kill_that_is_not_verified_ends_the_session(task: Task) -> None:
    faults = Faults(where="agent", result=lambda r: replace(r, kill_verified=False))
    with pytest.raises(BoundaryError, match="survived"):
        act(task, ("bash", {"command": "true"}), faults=(faults,))
