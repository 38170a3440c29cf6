"""A backend whose runtime is slow, as its operator says: limits of time are longer there, and it is said."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faulty_backend import FIX, KEY, TESTS, Faults, FaultyBackend, admission_of, small_task

from agentrl.errors import ConfigError
from agentrl.types import Action, EvidenceKey, ExecStatus, Limits, Observation, Task, Termination, Verdict
from envs.admission import admit
from envs.evidence import Admission, paced
from envs.sandbox.contract import time_multiplier
from envs.sandbox.docker import DockerBackend
from envs.sandbox.kubernetes_pod import Placement
from envs.sandbox.plain import PlainBackend
from envs.session import Session
from harness.attempt import slower_by

SLEEPY = """\
import time
from cart import total


def test_negative():
    time.sleep(1.5)
    assert total(-2, -3) == -5
"""


class SlowBackend(FaultyBackend):
    """One that notes which deadlines its sandboxes were given."""

    def __init__(self, multiplier: float) -> None:
        super().__init__(Faults(info=lambda info: replace(info, time_multiplier=multiplier)))
        self.time_multiplier = multiplier
        self.deadlines: list[float] = []

    async def create(self, spec: Any, *, session: str, deadline_s: float = 120.0, **rest: Any) -> Any:
        self.deadlines.append(deadline_s)
        return await super().create(spec, session=session, deadline_s=deadline_s, **rest)


def slow_task(folder: Path) -> Task:
    """Its tests and the command of its policy take a second and a half, and it gives them one."""
    task = small_task(folder, tests={"test_cart.py": TESTS, "test_hidden.py": SLEEPY}, timeout_sec=1)
    return replace(task, limits=replace(task.limits, exec_timeout_s=1.0))


def attempted(task: Task, backend: SlowBackend) -> tuple[Observation, Verdict, Session]:
    async def run() -> tuple[Observation, Verdict, Session]:
        try:
            record = await admission_of(task, backend)
            async with await Session.open(
                task, backend, session_id="agent", signing_key=KEY, admission=record
            ) as session:
                seen = await session.call(Action(id="1", tool="bash", arguments={"command": "sleep 1.5"}))
                await session.call(Action(id="2", tool=FIX[0], arguments=FIX[1]))
                return seen, await session.finalize(termination=Termination.FINISHED, fault=None), session
        finally:
            await backend.close()

    return asyncio.run(run())


def test_commands_verifiers_and_starts_have_the_time_of_the_runtime_and_the_verdict_names_it(
    tmp_path: Path,
) -> None:
    task, slow = slow_task(tmp_path / "t"), SlowBackend(10.0)
    seen, verdict, session = attempted(task, slow)
    assert (seen.status, seen.exit_code) == (ExecStatus.EXITED, 0)
    assert verdict.reward == 1.0
    facts = {link.key: link.facts for link in verdict.evidence}
    for key in (EvidenceKey.E1_START, EvidenceKey.E7_FRESH_VERIFIER):
        assert facts[key]["time_multiplier"] == 10.0
    assert slow.deadlines == [1200.0, 1200.0]
    assert (session.task.limits.exec_timeout_s, session.task.limits.wall_s) == (10.0, 10 * task.limits.wall_s)
    assert (session.task.revision, session.task.grader) == (task.revision, task.grader)
    assert slower_by(session) == 10.0


def test_without_it_the_same_attempt_times_out_and_nothing_is_said_of_a_multiplier(tmp_path: Path) -> None:
    task, prompt = slow_task(tmp_path / "t"), SlowBackend(1.0)
    seen, verdict, _ = attempted(task, prompt)
    assert seen.status is ExecStatus.TIMEOUT
    assert "timed out after 1 s" in seen.text
    assert verdict.reward != 1.0
    assert not any("time_multiplier" in link.facts for link in verdict.evidence)
    assert set(prompt.deadlines) == {120.0}


def test_a_task_is_validated_with_the_time_of_the_runtime(tmp_path: Path) -> None:
    def admitted(multiplier: float) -> Admission:
        async def run() -> Admission:
            backend = SlowBackend(multiplier)
            try:
                return await admit(slow_task(tmp_path / f"t{multiplier:g}"), backend, light=True)
            finally:
                await backend.close()

        return asyncio.run(run())

    assert admitted(10.0).reasons == ()
    tight = admitted(1.0)
    assert "solution: does not pass" in tight.reasons[0]


def test_only_what_a_task_says_of_time_is_longer() -> None:
    limits = Limits(max_turns=3, max_tokens=5, max_context=7, observation_bytes=9)
    assert paced(limits, 2.5) == replace(limits, exec_timeout_s=150.0, wall_s=4500.0)
    assert paced(limits, 1.0) == limits


@pytest.mark.parametrize("said", ["0.5", "0", "-2", "nan", "inf", "2x", ""])
def test_a_multiplier_is_a_number_of_at_least_one(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, make in (
        ("DOCKER", lambda: DockerBackend(tmp_path)),
        ("KUBERNETES", Placement.from_environment),
    ):
        monkeypatch.setenv(f"AGENTRL_{name}_TIME_MULTIPLIER", said)
        with pytest.raises(ConfigError, match=f"AGENTRL_{name}_TIME_MULTIPLIER"):
            make()


def test_an_operator_says_it_of_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert time_multiplier(DockerBackend(tmp_path)) == 1.0
    assert time_multiplier(PlainBackend(tmp_path)) == 1.0, "one that says nothing of it"
    monkeypatch.setenv("AGENTRL_DOCKER_TIME_MULTIPLIER", "2.5")
    monkeypatch.setenv("AGENTRL_KUBERNETES_TIME_MULTIPLIER", "3")
    assert time_multiplier(DockerBackend(tmp_path)) == 2.5
    assert time_multiplier(DockerBackend(tmp_path, time_multiplier=4.0)) == 4.0
    assert Placement.from_environment().time_multiplier == 3.0
