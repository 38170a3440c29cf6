"""A stored trajectory to what a person reads: turns with token counts, text, log-probs, versions, verdict.

Text is decoded from the exact generated ids where the published tokenizer is at hand, so that it shows what
was sampled; otherwise actions stand as they were parsed. Views are for reading alone: nothing made here is
ever encoded again. Shared by `agentrl trajectories show` and the report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tokenizers import Tokenizer

from agentrl.errors import StoreError
from agentrl.store import Store
from agentrl.store.rows import RunRow
from agentrl.types import Action, Evidence, EvidenceKey, Fault, ModelCall, Observation, Trajectory, Turn

NOT_ADMITTED = "not_admitted"
"""Fault code of demonstrations on tasks that were never to earn anything: no fault of anybody."""

Decode = Callable[[tuple[int, ...]], str]

EVIDENCE_MEANS: Mapping[EvidenceKey, str] = {
    EvidenceKey.E1_START: "started as the task asks: image, instance, limits",
    EvidenceKey.E2_PROBE_BEFORE: "healthy before the first action",
    EvidenceKey.E3_SAME_INSTANCE: "the same sandbox from start to end",
    EvidenceKey.E4_EXECS_FRAMED: "every command ended with a framed result",
    EvidenceKey.E5_NO_FOREIGN_LOSS: "nothing was killed by anyone else",
    EvidenceKey.E6_PROBE_AFTER: "healthy after the last action",
    EvidenceKey.E7_FRESH_VERIFIER: "judged in a fresh sandbox",
    EvidenceKey.E8_REPORT_COMPLETE: "the test report is complete",
    EvidenceKey.E9_REWARD_FINITE: "the reward is a fresh, finite number",
    EvidenceKey.E10_TASK_VALIDATED: "the task was validated at this revision",
}
"""What each link of the chain of evidence says."""


_PICTURES = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
_PICTURES |= dict.fromkeys(range(128, 160), 65533)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionView:
    """One action and what it caused."""

    tool: str
    arguments: Mapping[str, Any]
    error: str | None
    """Why the sampled text was not usable as an action."""
    status: str | None
    exit_code: int | None
    wall_ms: float | None
    is_error: bool
    observation: str | None
    """What the model was shown; None: the attempt ended first."""
    truncated_bytes: int = 0

    @property
    def outcome(self) -> str:
        """`exited 0 · 12 ms`, `not usable`, `no answer`."""
        if self.error is not None:
            return "not usable"
        if self.observation is None:
            return "no answer"
        parts = [self.status or ("error" if self.is_error else "done")]
        if self.exit_code is not None:
            parts[0] += f" {self.exit_code}"
        if self.wall_ms is not None:
            parts.append(f"{self.wall_ms:.0f} ms")
        return " · ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One model call with its actions. Counts are tokens."""

    number: int
    call_id: str
    prompt_tokens: int
    new_tokens: int
    """Of the prompt, those that its parent call had not seen."""
    generated_tokens: int
    text: str | None
    """The generated ids, decoded as a whole; None without a tokenizer."""
    log_prob_mean: float | None
    log_prob_min: float | None
    """None: this sampler has no log-probs."""
    log_probs_missing: int
    """Tokens whose log-prob the engine did not tell."""
    versions: tuple[int, ...]
    """Policy versions in the order of their tokens; empty: unknown."""
    branch_reason: str | None
    finish_reason: str
    seconds: float
    actions: tuple[ActionView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryView:
    """One trajectory for reading. `evidence` always has all ten links; one that nobody gave is unknown."""

    id: str
    run_id: str
    phase: str
    step: int | None
    task_id: str
    task_revision: str
    instruction: str | None
    group_id: str
    index: int
    split: str
    harness: str
    model: str | None
    turns: tuple[TurnView, ...]
    termination: str
    reward: float | None
    components: Mapping[str, float]
    evidence: tuple[Evidence, ...]
    tests: tuple[tuple[str, str, str], ...]
    """Name, outcome, message."""
    fault: Fault | None
    flags: tuple[str, ...]
    isolation: str
    grader_revision: str
    signature: str
    content_hash: str
    seq: int
    chain: str
    seconds: float
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generated_tokens(self) -> int:
        return sum(turn.generated_tokens for turn in self.turns)


def decoder(store: Store, run_id: str) -> Decode | None:
    """Decodes ids with the tokenizer that the run (or one that it resumes) left: in its folder, or beside a
    published version. None when nothing is left."""
    for run in store.lineage(run_id):
        folder = run_folder(store.run(run))
        places = [] if folder is None else [folder / "tokenizer"]
        places += [Path(version.location) for version in reversed(store.policy_versions(run))]
        for place in places:
            file = place / "tokenizer.json"
            if file.is_file():
                tokenizer = Tokenizer.from_file(str(file))
                return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    return None


def run_folder(run: RunRow) -> Path | None:
    """Where the run's own files are, as its configuration says; None when it does not."""
    section = run.config.get("run")
    if not isinstance(section, Mapping):
        return None
    return Path(section.get("dir") or f"runs/{section.get('name', run.name)}")


def load(store: Store, trajectory_id: str, *, decode: Decode | None = None) -> TrajectoryView:
    """The view of a stored trajectory. `StoreError` when there is none."""
    row = store.trajectory_row(trajectory_id)
    trajectory = store.trajectory(trajectory_id)
    verdict = trajectory.verdict
    given = {link.key: link for link in verdict.evidence}
    return TrajectoryView(
        id=trajectory.id,
        run_id=row.run_id,
        phase=row.phase,
        step=row.step,
        task_id=trajectory.task_id,
        task_revision=trajectory.task_revision,
        instruction=_instruction(store, trajectory),
        group_id=trajectory.group_id,
        index=trajectory.index,
        split=str(trajectory.split),
        harness=trajectory.harness,
        model=trajectory.calls[0].model if trajectory.calls else None,
        turns=_turns(trajectory, decode),
        termination=str(trajectory.termination),
        reward=trajectory.reward,
        components=verdict.components,
        evidence=tuple(given.get(key) or Evidence(key=key, holds=None) for key in EvidenceKey),
        tests=tuple((t.name, t.outcome, t.message) for t in verdict.tests),
        fault=verdict.fault,
        flags=verdict.flags,
        isolation=verdict.isolation,
        grader_revision=verdict.grader_revision,
        signature=verdict.signature,
        content_hash=row.content_hash,
        seq=row.seq,
        chain=row.chain,
        seconds=trajectory.finished_at - trajectory.started_at,
        metadata=trajectory.metadata,
    )


def visible(text: str) -> str:
    """Control characters as their pictures (`␛`), so that what a policy wrote can not steer a terminal.
    Newlines and tabs stay."""
    return text.translate(_PICTURES)


def call_text(tool: str, arguments: Mapping[str, Any]) -> str:
    """An action as parsed: `bash(command="ls")`."""
    return f"{tool}({', '.join(f'{k}={json.dumps(v, ensure_ascii=False)}' for k, v in arguments.items())})"


def _turns(trajectory: Trajectory, decode: Decode | None) -> tuple[TurnView, ...]:
    by_call = {turn.call_id: turn for turn in trajectory.turns}
    return tuple(
        _turn(number, call, by_call.get(call.id), decode)
        for number, call in enumerate(trajectory.calls, start=1)
    )


def _turn(number: int, call: ModelCall, turn: Turn | None, decode: Decode | None) -> TurnView:
    told = [p for p in call.generation_log_probs or () if p is not None]
    seen = {} if turn is None else {o.action_id: o for o in turn.observations}
    return TurnView(
        number=number,
        call_id=call.id,
        prompt_tokens=call.prompt_keep + len(call.prompt_delta),
        new_tokens=len(call.prompt_delta),
        generated_tokens=len(call.generation_token_ids),
        text=None if decode is None else decode(call.generation_token_ids),
        log_prob_mean=fmean(told) if told else None,
        log_prob_min=min(told, default=None),
        log_probs_missing=0
        if call.generation_log_probs is None
        else len(call.generation_log_probs) - len(told),
        versions=tuple(span.version for span in call.policy_versions),
        branch_reason=None if call.branch_reason is None else str(call.branch_reason),
        finish_reason=str(call.finish_reason),
        seconds=call.finished_at - call.started_at,
        actions=() if turn is None else tuple(_action(a, seen.get(a.id)) for a in turn.actions),
    )


def _action(action: Action, observation: Observation | None) -> ActionView:
    return ActionView(
        tool=action.tool,
        arguments=action.arguments,
        error=action.error,
        status=None if observation is None or observation.status is None else str(observation.status),
        exit_code=None if observation is None else observation.exit_code,
        wall_ms=None if observation is None else observation.wall_ms,
        is_error=observation is not None and observation.is_error,
        observation=None if observation is None else observation.text,
        truncated_bytes=0 if observation is None else observation.truncated_bytes,
    )


def _instruction(store: Store, trajectory: Trajectory) -> str | None:
    """What the task asks, if its revision is kept in the store."""
    try:
        return store.task(trajectory.task_id, trajectory.task_revision).instruction
    except StoreError:
        return None
