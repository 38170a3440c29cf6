"""The harness on a real session: a generated task, the plain backend, a scripted policy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tiny_tokenizer import tokenizer

from agentrl.inference.scripted import ScriptedSampler
from agentrl.types import EvidenceKey, SandboxSpec, Termination, Trajectory
from envs.admission import admit
from envs.grading import verify_signature
from envs.sandbox.plain import PlainBackend
from envs.tasks.package import load_task
from envs.tasks.swe_mini import generate
from harness.chat import ChatFormat
from harness.rollout import RolloutSettings, run_one

SUBMIT = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'
READ = '<tool_call>{"name": "read_file", "arguments": {"path": "%s"}}</tool_call>'


def test_an_attempt_that_changes_nothing_earns_a_signed_zero(tmp_path: Path) -> None:
    chat = ChatFormat(tokenizer("chatml"))
    task = load_task(generate(tmp_path, train=1, heldout=0, seed=3)[0])

    async def whole() -> Trajectory:
        backend = PlainBackend()
        try:
            admission = await admit(task, backend, light=True)
            lines = [READ % task.metadata["file"], SUBMIT]
            return await run_one(
                task,
                sampler=ScriptedSampler(lambda request, number: lines[number], encode=chat.encode_reply),
                chat=chat,
                backend=backend,
                group_id="g",
                index=0,
                signing_key=b"key",
                admission=admission,
                settings=RolloutSettings(require_log_probs=False),
            )
        finally:
            await backend.close()

    trajectory = asyncio.run(whole())
    assert (trajectory.termination, trajectory.reward) == (Termination.FINISHED, 0.0)
    assert verify_signature(trajectory.verdict, b"key")
    assert "def " in trajectory.turns[0].observations[0].text
    assert trajectory.turns[0].observations[0].text in chat.decode(
        trajectory.prompt_ids(trajectory.calls[1].id)
    )


def test_an_attempt_that_can_earn_nothing_is_recorded_without_a_verifier(tmp_path: Path) -> None:
    chat = ChatFormat(tokenizer("chatml"))
    task = load_task(generate(tmp_path, train=1, heldout=0, seed=3)[0])
    sandboxes: list[str] = []

    class Counted(PlainBackend):
        async def create(self, spec: SandboxSpec, *, session: str, **rest: Any) -> Any:
            sandboxes.append(session)
            return await super().create(spec, session=session, **rest)

    async def whole() -> Trajectory:
        backend = Counted()
        try:
            return await run_one(
                task,
                sampler=ScriptedSampler(lambda request, number: SUBMIT, encode=chat.encode_reply),
                chat=chat,
                backend=backend,
                group_id="g",
                index=0,
                signing_key=b"key",
                settings=RolloutSettings(require_log_probs=False),
                judge=False,
            )
        finally:
            await backend.close()

    trajectory = asyncio.run(whole())
    assert sandboxes == ["g.0.1"]
    verdict = trajectory.verdict
    assert (trajectory.termination, trajectory.reward) == (Termination.FINISHED, None)
    assert verdict.fault is not None
    assert (verdict.fault.owner, verdict.fault.code) == ("task", "not_admitted")
    assert verify_signature(verdict, b"key")
    known = {e.key: e.holds for e in verdict.evidence}
    assert known[EvidenceKey.E1_START] is True
    assert known[EvidenceKey.E7_FRESH_VERIFIER] is None
