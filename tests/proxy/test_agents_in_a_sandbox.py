"""Third-party agents in sandboxes: unmodified programs that know a base URL and a key."""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from proxied import Engine
from tiny_tokenizer import tokenizer

from agentrl.config import RolloutSection
from agentrl.errors import ConfigError, SandboxError
from agentrl.inference.sampler import SampleRequest
from agentrl.learner import samples
from agentrl.types import SamplingParams, Task, Termination, Trajectory
from envs.admission import admit
from envs.sandbox.contract import Backend
from envs.sandbox.local import LocalBackend
from envs.sandbox.plain import PlainBackend
from envs.session import Session
from envs.tasks.package import load_task
from envs.tasks.swe_mini import generate
from harness.agents import catalogue
from harness.agents.command import AgentCommand, CommandAgent
from harness.chat import ChatFormat
from harness.rollout import RolloutSettings, run_one

Script = Callable[[SampleRequest, int], str]


def backends() -> list[Any]:
    return [
        pytest.param("plain", id="plain"),
        pytest.param("local", id="local", marks=pytest.mark.sandbox),
    ]


def make(name: str) -> Backend:
    if name == "plain":
        return PlainBackend()
    backend = LocalBackend()
    try:
        backend.check()
    except SandboxError as refused:
        pytest.skip(str(refused))
    return backend


def bash(command: str) -> str:
    body = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<tool_call>\n{body}\n</tool_call>"


def attempt(
    name: str, folder: Path, agent: CommandAgent, script: Callable[[Task], Script], **limits: Any
) -> tuple[Trajectory, ChatFormat]:
    task = load_task(generate(folder, train=1, heldout=0, seed=3)[0])
    wanted = {"max_tokens": 100_000, "max_context": 100_000, **limits}
    chat = ChatFormat(tokenizer("chatml"))

    async def whole() -> Trajectory:
        backend = make(name)
        try:
            admission = await admit(task, backend, light=True)
            roomy = replace(
                task,
                limits=replace(task.limits, **wanted),
                sandbox=replace(task.sandbox, memory_mib=2048),
            )
            return await run_one(
                roomy,
                sampler=Engine(chat, script(task)),
                chat=chat,
                backend=backend,
                group_id="g",
                index=0,
                signing_key=b"key",
                admission=admission,
                agent=agent,
                settings=RolloutSettings(sampling=SamplingParams(max_tokens=4096)),
                open_session=functools.partial(Session.open, mounts=agent.mounts),
            )
        finally:
            await backend.close()

    return asyncio.run(whole()), chat


def fixing(task: Task) -> Script:
    """Two commands at once, then the right edit, then an answer."""
    solution = (Path(task.path) / "solution" / "solve.sh").read_text()
    lines = [bash(f"cat {task.metadata['file']}") + "\n" + bash("ls"), bash(solution), "Fixed."]
    return lambda request, number: lines[number]


def test_a_run_file_can_name_every_agent_of_the_catalogue_and_no_other() -> None:
    named = get_args(RolloutSection.model_fields["agent"].annotation)
    assert set(named) == {catalogue.BUILT_IN, *catalogue.AGENTS}
    assert [catalogue.get(name).name.partition("/")[0] for name in named] == list(named)
    with pytest.raises(ConfigError, match="mini-swe-agent"):
        catalogue.get("mini-swe")


@pytest.mark.parametrize("name", backends())
def test_a_loop_agent_in_a_sandbox_without_network_is_recorded_exactly_and_graded(
    name: str, tmp_path: Path
) -> None:
    agent = catalogue.get("shell-loop")
    assert isinstance(agent, CommandAgent)
    trajectory, chat = attempt(name, tmp_path, agent, fixing)
    assert trajectory.verdict.fault is None, trajectory.verdict.fault
    assert (trajectory.termination, trajectory.harness) == (Termination.FINISHED, "shell-loop/1")
    assert [c.branch_reason for c in trajectory.calls] == [None, None, None]
    assert [len(t.actions) for t in trajectory.turns] == [2, 1, 0]
    assert "def " in trajectory.turns[0].observations[0].text
    rows = samples.build(trajectory, vocab_size=chat.vocab_size)
    assert len(rows.rows) == 1
    assert rows.valid_N.all()
    assert trajectory.reward == 1.0


def test_an_agent_that_breaks_is_a_fault_with_its_last_words_and_no_reward(tmp_path: Path) -> None:
    broken = CommandAgent(
        AgentCommand(name="broken/1", argv=("python3", "-c", "raise SystemExit('no such module')"))
    )
    trajectory, _ = attempt("plain", tmp_path, broken, lambda task: lambda request, number: "x")
    fault = trajectory.verdict.fault
    assert fault is not None
    assert (fault.owner, fault.code, trajectory.reward) == ("environment", "agent_broke", None)
    assert "no such module" in fault.message


def test_an_agent_that_goes_on_without_end_is_stopped_by_its_budget_and_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.agents.command.GRACE_S", 1.0)
    code = (
        "import os, time, urllib.request, urllib.error, json\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "while True:\n"
        "    body = {'model': 'm', 'messages': [{'role': 'user', 'content': str(time.time())}]}\n"
        "    head = {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "    asked = urllib.request.Request(url, json.dumps(body).encode(), head)\n"
        "    try: urllib.request.urlopen(asked).read()\n"
        "    except urllib.error.HTTPError as error: print(error.read()); time.sleep(60)\n"
    )
    endless = CommandAgent(AgentCommand(name="endless/1", argv=("python3", "-c", code)))
    trajectory, _ = attempt(
        "plain", tmp_path, endless, lambda task: lambda request, number: "again", max_turns=3
    )
    assert trajectory.termination is Termination.MAX_TURNS
    assert len(trajectory.calls) == 3
    assert trajectory.verdict.fault is None
    assert trajectory.metadata["refused_budget_max_turns"] == 1
    assert trajectory.reward == 0.0


@pytest.mark.skipif(
    not os.environ.get("AGENTRL_TEST_MINI"),
    reason="AGENTRL_TEST_MINI names no folder of `pip install --target /usr/local/lib/mini mini-swe-agent`",
)
@pytest.mark.parametrize("name", backends())
def test_mini_swe_agent_runs_unmodified_and_every_call_is_exact(name: str, tmp_path: Path) -> None:
    agent = catalogue.get("mini-swe-agent", folder=Path(os.environ["AGENTRL_TEST_MINI"]))
    assert isinstance(agent, CommandAgent)

    def script(task: Task) -> Script:
        lines = [
            "Look first.\n" + bash(f"cat {task.metadata['file']}"),
            bash("ls") + "\n" + bash("pwd"),
            bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ]
        return lambda request, number: lines[number]

    trajectory, chat = attempt(name, tmp_path, agent, script)
    assert trajectory.verdict.fault is None, trajectory.verdict.fault
    assert trajectory.termination is Termination.FINISHED
    assert trajectory.harness.startswith("mini-swe-agent/2")
    assert [c.branch_reason for c in trajectory.calls] == [None, None, None]
    rows = samples.build(trajectory, vocab_size=chat.vocab_size)
    assert len(rows.rows) == 1
    assert rows.valid_N.all()
    assert "def " in trajectory.turns[0].observations[0].text
