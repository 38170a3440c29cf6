"""A small run by hand: records as a real one leaves them, with a byte-level tokenizer to decode them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentrl.config import parse
from agentrl.store import Store
from agentrl.types import (
    Action,
    Evidence,
    EvidenceKey,
    ExecStatus,
    Fault,
    FinishReason,
    LogProbKind,
    ModelCall,
    Observation,
    PolicyVersion,
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

INSTRUCTION = "The variable k in cart.py is wrong: the tests fail. Put it right and submit."


def tokenizer() -> Tokenizer:
    """One token per byte, and two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return made


def attempt(
    name: str,
    *,
    group: str,
    index: int,
    version: int | None,
    solved: bool,
    tested: bool,
    at: float,
    words: Tokenizer,
    split: Split = Split.TRAIN,
    termination: Termination = Termination.FINISHED,
) -> Trajectory:
    """Read, edit, perhaps run the tests, submit; a fault ends it after the first turn."""
    tools: list[tuple[str, dict[str, str], str]] = [
        ("read_file", {"path": "cart.py"}, "def amber(a, k):\n    k = a + k\n    return k\n"),
        (
            "replace_in_file",
            {"path": "cart.py", "old": "k = a + k", "new": "k = a - k"},
            "Replaced in cart.py:\n    k = a - k",
        ),
    ]
    if tested:
        tools.append(("run_tests", {}, "PASSED 3/3" if solved else "FAILED 1/3\nFAILED test_amber: 3 != 4"))
    tools.append(("submit", {}, "Submitted."))
    if termination is Termination.FAULT:
        tools = tools[:1]
    if termination is Termination.MAX_TURNS:
        tools = tools[:-1]
    calls: list[ModelCall] = []
    turns: list[Turn] = []
    prompt = list(words.encode(f"<|im_start|>user\n{INSTRUCTION}<|im_end|><|im_start|>assistant\n").ids)
    kept = 0
    for number, (tool, arguments, observation) in enumerate(tools):
        text = f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call><|im_end|>"
        ids = tuple(words.encode(text).ids)
        calls.append(
            ModelCall(
                id=f"{name}.c{number}",
                parent_id=calls[-1].id if calls else None,
                prompt_keep=kept,
                prompt_delta=tuple(prompt[kept:]),
                prompt_hash=token_hash(tuple(prompt)),
                generation_token_ids=ids,
                generation_log_probs=None if version is None else tuple(-0.25 for _ in ids),
                log_prob_kind=None if version is None else LogProbKind.PROCESSED,
                policy_versions=()
                if version is None
                else (VersionSpan(version=version, start=0, end=len(ids)),),
                sampling=SamplingParams(),
                finish_reason=FinishReason.STOP,
                model="small",
                view_hash="f" * 64,
                started_at=at + number,
                finished_at=at + number + 0.5,
            )
        )
        action = Action(id=f"a{number}", tool=tool, arguments=arguments)
        seen = Observation(
            action_id=action.id, text=observation, status=ExecStatus.EXITED, exit_code=0, wall_ms=4.5
        )
        lost = termination is Termination.FAULT
        turns.append(Turn(call_id=calls[-1].id, actions=(action,), observations=() if lost else (seen,)))
        prompt += [
            *ids,
            *words.encode(f"<|im_start|>tool\n{observation}<|im_end|><|im_start|>assistant\n").ids,
        ]
        kept = calls[-1].prompt_keep + len(calls[-1].prompt_delta) + len(ids)
    return Trajectory(
        id=name,
        task_id=f"swe_mini/s1-{split}-{int(at) % 97:05d}",
        task_revision="0" * 64,
        group_id=group,
        index=index,
        harness="tool-agent/1",
        split=split,
        calls=tuple(calls),
        turns=tuple(turns),
        termination=termination,
        verdict=_verdict(solved, termination),
        started_at=at,
        finished_at=at + len(tools),
    )


def _verdict(solved: bool, termination: Termination) -> Verdict:
    whole = tuple(Evidence(key=key, holds=True, facts={"instance": "i1"}) for key in EvidenceKey)
    if termination is Termination.FAULT:
        lost = Fault(
            owner="environment",
            code="sandbox_lost",
            phase="exec",
            retryable=True,
            message="The sandbox is gone.",
        )
        held = tuple(replace(e, holds=None) if e.key is EvidenceKey.E6_PROBE_AFTER else e for e in whole[:6])
        return Verdict(reward=None, evidence=held, fault=lost, grader_revision="g1", isolation="namespaces")
    return Verdict(
        reward=1.0 if solved else 0.0,
        components={"tests_passed": 1.0 if solved else 0.5},
        evidence=whole,
        fault=None,
        grader_revision="g1",
        isolation="namespaces",
        tests=(
            TestOutcome(name="test_cart.py::test_amber", outcome="passed" if solved else "failed"),
            TestOutcome(name="test_cart.py::test_grove", outcome="passed"),
        ),
        signature="ab" * 32,
    )


def fill(
    url: str,
    folder: Path,
    *,
    updates: int = 4,
    groups: int = 2,
    size: int = 4,
    heldout: int = 12,
    seed: int = 1,
) -> str:
    """Begin a run in the store and leave what a whole run leaves; its id."""
    draw = random.Random(seed)
    words = tokenizer()
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    words.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = parse({"run": {"name": "made", "seed": seed, "dir": str(folder)}})
    with Store.open(url) as store:
        run = store.begin_run("made", config=config.model_dump(mode="json"), algo="grpo", seed=seed)
        at = run.started_at

        def add(
            phase: str, number: int, solves: float, tests: float, version: int | None, step: int | None
        ) -> str:
            nonlocal at
            at += 0.4
            luck = draw.random()
            end = (
                Termination.FAULT if phase == "train" and number == 3 and step == 2 else Termination.FINISHED
            )
            end = Termination.MAX_TURNS if luck > 0.97 else end
            group = f"{phase}-{step or 0}-{number // size}"
            name = f"{group}.{number % size}.1"
            made = attempt(
                name,
                group=group,
                index=number % size,
                version=version,
                solved=luck < solves,
                tested=draw.random() < tests,
                at=float(int(at)) if phase.startswith("heldout") else 1000.0 + number // size,
                words=words,
                split=Split.HELDOUT if phase.startswith("heldout") else Split.TRAIN,
                termination=end,
            )
            task = f"swe_mini/s1-{made.split}-{number // size:05d}"
            store.add_trajectory(run.id, replace(made, task_id=task), phase=phase, step=step)
            return name

        for number in range(size):
            add("demonstration", number, 0.5, 0.3, None, None)
        version = PolicyVersion(
            number=0,
            parent=None,
            step=0,
            location=str(folder / "versions" / "v000000"),
            content_hash="a" * 64,
            config_hash="b" * 64,
            published_at=at,
        )
        store.publish(run.id, version)
        for number in range(heldout):
            add("heldout_before", number, 0.35, 0.3, 0, None)
        for update in range(1, updates + 1):
            progress = update / updates
            ids = [
                add("train", number, 0.35 + 0.6 * progress, 0.3 + 0.65 * progress, update - 1, update)
                for number in range(groups * size)
            ]
            trained = [name for name in ids if store.trajectory_row(name).reward is not None]
            rewards = [store.trajectory_row(name).reward or 0.0 for name in trained]
            version = replace(version, number=update, parent=update - 1, step=update)
            metrics = {
                "reward/mean": sum(rewards) / len(rewards),
                "loss/policy": -0.1 + draw.random() * 0.02,
                "policy/entropy": 0.6 - 0.4 * progress,
                "optimizer/grad_norm": 0.5 + draw.random(),
                "mismatch/abs_mean": 2e-7 + 1e-7 * draw.random(),
                "mismatch/abs_max": 1e-5 * draw.random(),
                "rollout/tests_run_share": 0.3 + 0.65 * progress,
                "rollout/success": sum(rewards) / len(rewards),
                "time/rollout_s": 6.0 + draw.random(),
                "time/forward_s": 0.8,
                "time/backward_s": 1.7,
                "time/publish_s": 0.1,
            }
            store.record_update(run.id, update, trained, version, metrics)
        for number in range(heldout):
            add("heldout_after", number, 0.93, 0.96, updates, None)
        store.note(run.id, "begin", "heldout_after")
        store.finish_run(run.id)
        return run.id
