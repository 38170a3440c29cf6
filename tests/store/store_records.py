"""Trajectories for the store's tests: small ones by hand, and any valid one by Hypothesis."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

from hypothesis import strategies as st

from agentrl.types import (
    Action,
    BranchReason,
    Evidence,
    EvidenceKey,
    ExecStatus,
    Fault,
    FinishReason,
    LogProbKind,
    ModelCall,
    Observation,
    SamplingParams,
    Split,
    Termination,
    TestOutcome,
    Trajectory,
    Turn,
    Verdict,
    VersionSpan,
    token_hash,
)

ALL_EVIDENCE = tuple(Evidence(key=key, holds=True, facts={"seen": 1}) for key in EvidenceKey)
LOST = Fault(owner="environment", code="sandbox_lost", phase="run", retryable=True, message="it went away")


def call(
    name: str,
    prompt: tuple[int, ...],
    generation: tuple[int, ...],
    *,
    parent: str | None = None,
    keep: int = 0,
    log_probs: tuple[float | None, ...] | None = None,
    versions: tuple[VersionSpan, ...] = (),
    reason: BranchReason | None = None,
) -> ModelCall:
    """A call with this whole prompt, of which the first `keep` tokens are its parent's."""
    return ModelCall(
        id=name,
        parent_id=parent,
        prompt_keep=keep,
        prompt_delta=prompt[keep:],
        prompt_hash=token_hash(prompt),
        branch_reason=reason,
        generation_token_ids=generation,
        generation_log_probs=log_probs,
        log_prob_kind=None if log_probs is None else LogProbKind.PROCESSED,
        policy_versions=versions,
        sampling=SamplingParams(seed=2**70),
        finish_reason=FinishReason.STOP,
        model="tiny",
        view_hash="f" * 64,
        started_at=1.25,
        finished_at=2.5,
    )


def verdict(reward: float | None = 1.0, fault: Fault | None = None) -> Verdict:
    return Verdict(
        reward=reward,
        components={"tests": 0.1, "style": -0.0},
        evidence=ALL_EVIDENCE,
        fault=fault,
        grader_revision="g1",
        isolation="namespaces",
        tests=(TestOutcome(name="test_a", outcome="passed"),),
        flags=("slow",),
    )


def trajectory(
    name: str | None = None,
    *,
    calls: tuple[ModelCall, ...] | None = None,
    turns: tuple[Turn, ...] | None = None,
    termination: Termination = Termination.FINISHED,
    earned: Verdict | None = None,
    **more: Any,
) -> Trajectory:
    """Two calls with an observation between them, unless told otherwise."""
    if calls is None:
        span = (VersionSpan(version=1, start=0, end=1), VersionSpan(version=2, start=1, end=2))
        calls = (
            call("a", (9, 4), (7, 2), log_probs=(-0.5, None), versions=span),
            call("b", (9, 4, 7, 2, 5, 4), (1,), parent="a", keep=4, log_probs=(-2.25,)),
        )
    if turns is None:
        made = Action(id="x", tool="bash", arguments={"command": "ls \0"})
        seen = Observation(action_id="x", text="file\0 é", status=ExecStatus.EXITED, exit_code=0, wall_ms=1.5)
        bad = Action(id="y", tool="bash", error="not JSON")
        turns = (Turn(call_id=calls[0].id, actions=(made, bad), observations=(seen,)),) if calls else ()
    values: dict[str, Any] = {
        "task_id": "suite/one",
        "task_revision": "0" * 64,
        "group_id": "g1",
        "index": 0,
        "harness": "tool-agent/1",
        "split": Split.TRAIN,
        "started_at": 100.5,
        "finished_at": 101.25,
        "metadata": {"host": "here", "n": 1, "x": 0.1, "none": None, "yes": True},
    }
    return Trajectory(
        id=name or uuid.uuid4().hex,
        calls=calls,
        turns=turns,
        termination=termination,
        verdict=earned or verdict(),
        **{**values, **more},
    )


# ------------------------------------------------------------------------------------- any valid trajectory

_ids = st.integers(0, 2**31 - 1)
_word = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_time = st.floats(0, 2**33)
_known = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False, width=32) | st.floats(
    max_value=0.0, allow_nan=False, allow_infinity=False
)
_scalar = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
)
_facts = st.dictionaries(_text, _scalar | _text, max_size=3)
_json = st.recursive(
    _scalar | _text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_text, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def _versions(draw: st.DrawFn, n: int) -> tuple[VersionSpan, ...]:
    if draw(st.booleans()):
        return ()
    cuts = sorted({0, n, *draw(st.lists(st.integers(1, n), max_size=3))})
    return tuple(
        VersionSpan(version=draw(st.integers(0, 2**40)), start=a, end=b) for a, b in itertools.pairwise(cuts)
    )


@st.composite
def _calls(draw: st.DrawFn) -> tuple[ModelCall, ...]:
    calls: list[ModelCall] = []
    whole: dict[str, tuple[int, ...]] = {}
    for at in range(draw(st.integers(0, 6))):
        parent = draw(st.none() | st.sampled_from(list(whole))) if whole else None
        before = whole[parent] if parent is not None else ()
        keep = draw(st.just(len(before)) | st.integers(0, len(before)))
        prompt = before[:keep] + tuple(draw(st.lists(_ids, min_size=0 if parent else 1, max_size=5)))
        generation = tuple(draw(st.lists(_ids, min_size=1, max_size=20)))
        n = len(generation)
        name = f"c{at}{draw(_word)}"
        log_probs = draw(st.none() | st.lists(st.none() | _known, min_size=n, max_size=n).map(tuple))
        calls.append(
            call(
                name,
                prompt,
                generation,
                parent=parent,
                keep=keep,
                log_probs=log_probs,
                versions=draw(_versions(n)),
                reason=draw(st.sampled_from(BranchReason)) if keep < len(before) else None,
            )
        )
        whole[name] = prompt + generation
    return tuple(calls)


@st.composite
def _turn(draw: st.DrawFn, calls: tuple[ModelCall, ...]) -> Turn:
    actions = tuple(
        Action(
            id=str(at),
            tool=draw(_word),
            arguments=draw(st.dictionaries(_text, _json, max_size=2)),
            error=draw(st.none() | _text),
        )
        for at in range(draw(st.integers(0, 2)))
    )
    observations = tuple(
        Observation(
            action_id=action.id,
            text=draw(_text),
            is_error=draw(st.booleans()),
            status=draw(st.none() | st.sampled_from(ExecStatus)),
            exit_code=draw(st.none() | st.integers(-255, 255)),
            wall_ms=draw(st.none() | _time),
            data=draw(st.dictionaries(_text, _json, max_size=2)),
        )
        for action in actions[: draw(st.integers(0, len(actions)))]
    )
    return Turn(call_id=draw(st.sampled_from(calls)).id, actions=actions, observations=observations)


@st.composite
def _verdict(draw: st.DrawFn) -> Verdict:
    rewarded = draw(st.booleans())
    owners = (
        ["policy", "budget"] if rewarded else ["policy", "budget", "task", "environment", "gateway", "model"]
    )
    fault = Fault(
        owner=draw(st.sampled_from(owners)),
        code=draw(_word),
        phase=draw(_text),
        retryable=draw(st.booleans()),
        message=draw(_text),
        evidence=draw(_facts),
    )
    return Verdict(
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)) if rewarded else None,
        components=draw(st.dictionaries(_text, st.floats(allow_nan=False, allow_infinity=False), max_size=3)),
        evidence=ALL_EVIDENCE
        if rewarded
        else (Evidence(key=EvidenceKey.E1_START, holds=None, facts=draw(_facts)),),
        fault=draw(st.just(fault) | st.none()) if rewarded else fault,
        grader_revision=draw(_word),
        isolation=draw(st.sampled_from(["namespaces", "docker", "kubernetes", "none"])),
        tests=tuple(TestOutcome(name=draw(_text), outcome="failed", message=draw(_text)) for _ in range(2)),
        flags=tuple(draw(st.lists(_text, max_size=2))),
    )


@st.composite
def any_trajectory(draw: st.DrawFn) -> Trajectory:
    """Trees with branches, null log-probs, unknown versions, turns without answers, any text."""
    calls = draw(_calls())
    earned = draw(_verdict())
    ends = [t for t in Termination if t is not Termination.FAULT or earned.reward is None]
    return trajectory(
        calls=calls,
        turns=tuple(draw(st.lists(_turn(calls), max_size=3))) if calls else (),
        termination=draw(st.sampled_from(ends)),
        earned=earned,
        group_id=f"g{draw(_word)}",
        index=draw(st.integers(0, 2**40)),
        harness=draw(_word),
        split=draw(st.sampled_from(Split)),
        started_at=draw(_time),
        metadata=draw(_facts),
    )
