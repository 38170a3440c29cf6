"""One trajectory to rows of five tables and back: `assemble` undoes `explode`, `differences` proves it.

`content_hash` is over the canonical JSON of the whole record and its placement (phase, step); it does not
depend on how columns are compressed, so the same evidence has the same hash in every store and in every
export.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic_core

from agentrl.errors import EvidenceError, StoreError
from agentrl.store.codec import (
    LogProbColumns,
    compress,
    decompress,
    ids_from_bytes,
    pack_log_probs,
    unpack_log_probs,
)
from agentrl.store.prompts import checked_bytes
from agentrl.types import (
    ModelCall,
    Trajectory,
    Turn,
    Verdict,
    content_hash,
    from_dict,
    from_json,
    to_dict,
    to_json,
)

Row = Mapping[str, Any]

_PHASE = re.compile(r"[a-z0-9_]+")
_BLOBS = frozenset({"prompt_delta", "generation", "log_probs", "log_prob_valid", "body"})
_ID_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One trajectory as rows. `trajectory` lacks run, position and chain: those come when it is added."""

    trajectory: Row
    calls: Sequence[Row]
    turns: Sequence[Row]
    actions: Sequence[Row]
    verdict: Row


def canonical(value: object) -> str:
    """JSON text as stored: compact, UTF-8, no NaN.

    Raises:
        StoreError: the value holds something that JSON can not.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise StoreError(f"not JSON: {error}.", fix="Use str, finite numbers, lists and dicts.") from error


def trajectory_hash(trajectory: Trajectory, *, phase: str, step: int | None) -> str:
    """The content hash of a trajectory in its place.

    Raises:
        StoreError: the record holds something that JSON can not.
    """
    try:
        body = to_json(trajectory)
    except (pydantic_core.PydanticSerializationError, ValueError) as error:
        raise StoreError(f"trajectory {trajectory.id} can not be written as JSON: {error}") from error
    return content_hash(body, f"{phase}/{step}".encode())


def explode(trajectory: Trajectory, *, phase: str, step: int | None) -> Rows:
    """To rows. Linear in the number of tokens.

    Raises:
        EvidenceError: a prompt does not match its hash.
        StoreError: a value that no database can give back unchanged (NaN, NUL, a set); names where.
    """
    if not _PHASE.fullmatch(phase):
        raise StoreError(f"phase {phase!r} is not a word of a-z, 0-9 and _.")
    for at, turn in enumerate(trajectory.turns):
        for action in turn.actions:
            _require_json(action.arguments, f"turn {at}, arguments of {action.tool}")
        for observation in turn.observations:
            _require_json(observation.data, f"turn {at}, data of observation {observation.action_id}")
    calls = _call_rows(trajectory)
    turns = [
        {
            "trajectory_id": trajectory.id,
            "position": at,
            "call_id": turn.call_id,
            "body": compress(to_json(turn)),
        }
        for at, turn in enumerate(trajectory.turns)
    ]
    verdict = trajectory.verdict
    fault = verdict.fault
    spans = [span.version for call in trajectory.calls for span in call.policy_versions]
    row: dict[str, Any] = {
        "id": trajectory.id,
        "content_hash": trajectory_hash(trajectory, phase=phase, step=step),
        "blob_hash": blob_hash(calls, turns),
        "phase": phase,
        "step": step,
        "group_id": trajectory.group_id,
        "member": trajectory.index,
        "task_id": trajectory.task_id,
        "task_revision": trajectory.task_revision,
        "harness": trajectory.harness,
        "split": trajectory.split.value,
        "termination": trajectory.termination.value,
        "reward": verdict.reward,
        "fault_owner": None if fault is None else fault.owner,
        "fault_code": None if fault is None else fault.code,
        "n_turns": len(trajectory.turns),
        "n_calls": len(trajectory.calls),
        "n_tokens": sum(len(call.generation_token_ids) for call in trajectory.calls),
        "min_version": min(spans, default=None),
        "max_version": max(spans, default=None),
        "started_at": trajectory.started_at,
        "finished_at": trajectory.finished_at,
        "metadata": canonical(trajectory.metadata),
    }
    rows = Rows(
        trajectory=row,
        calls=calls,
        turns=turns,
        actions=_action_rows(trajectory),
        verdict=_verdict_row(trajectory.id, verdict),
    )
    for table in ([row], calls, turns, rows.actions, [rows.verdict]):
        for values in table:
            for column, value in values.items():
                if type(value) is str and "\0" in value:
                    raise StoreError(f"trajectory {trajectory.id}: {column} holds a NUL character.")
                if column.endswith("_at") and value == 0.0 and math.copysign(1.0, value) < 0:
                    raise StoreError(f"trajectory {trajectory.id}: {column} is -0.0, which is no time.")
    return rows


def assemble(rows: Rows) -> Trajectory:
    """Back to the record, validated.

    Raises:
        EvidenceError: the rows are not those of a valid record; names the field.
    """
    row, verdict = rows.trajectory, rows.verdict
    if not verdict:
        raise EvidenceError("its verdict is missing")
    return from_dict(
        Trajectory,
        {
            "id": row["id"],
            "task_id": row["task_id"],
            "task_revision": row["task_revision"],
            "group_id": row["group_id"],
            "index": row["member"],
            "harness": row["harness"],
            "split": row["split"],
            "calls": tuple(_call(call) for call in rows.calls),
            "turns": tuple(from_json(Turn, decompress(turn["body"])) for turn in rows.turns),
            "termination": row["termination"],
            "verdict": from_dict(
                Verdict,
                {
                    "reward": None if verdict["reward"] is None else _parse(verdict["reward"]),
                    "components": _parse(verdict["components"]),
                    "evidence": _parse(verdict["evidence"]),
                    "fault": None if verdict["fault"] is None else _parse(verdict["fault"]),
                    "grader_revision": verdict["grader_revision"],
                    "isolation": verdict["isolation"],
                    "tests": _parse(verdict["tests"]),
                    "flags": _parse(verdict["flags"]),
                    "signature": verdict["signature"],
                },
            ),
            "started_at": row["started_at"],
            "finished_at": row["finished_at"],
            "metadata": _parse(row["metadata"]),
        },
    )


def differences(stored: Rows, expected: Rows) -> str | None:
    """The first place where stored rows are not those that the record explodes into, or None.

    Compressed columns are left to `blob_hash`: another zstd library may pack the same content differently.
    """
    pairs = [
        ("trajectory", [stored.trajectory], [expected.trajectory]),
        ("calls", stored.calls, expected.calls),
        ("turns", stored.turns, expected.turns),
        ("actions", stored.actions, expected.actions),
        ("verdict", [stored.verdict], [expected.verdict]),
    ]
    for table, have, want in pairs:
        if len(have) != len(want):
            return f"{len(have)} rows of {table} where the record has {len(want)}"
        for at, (a, b) in enumerate(zip(have, want, strict=True)):
            for column, value in b.items():
                if column not in _BLOBS and column != "blob_hash" and a[column] != value:
                    return f"{table}[{at}].{column} is {a[column]!r} where the record has {value!r}"
    return None


def blob_hash(calls: Sequence[Row], turns: Sequence[Row]) -> str:
    """Hash of the binary columns exactly as stored. NULL and empty differ."""
    columns = [c[n] for c in calls for n in ("prompt_delta", "generation", "log_probs", "log_prob_valid")]
    columns += [t["body"] for t in turns]
    return content_hash(*(b"" if blob is None else b"\1" + blob for blob in columns))


# --------------------------------------------------------------------------------------------- one table each


def _call_rows(trajectory: Trajectory) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for at, (call, raw) in enumerate(zip(trajectory.calls, checked_bytes(trajectory.calls), strict=True)):
        packed = pack_log_probs(call.generation_log_probs)
        rows.append(
            {
                "trajectory_id": trajectory.id,
                "position": at,
                "id": call.id,
                "parent_id": call.parent_id,
                "prompt_keep": call.prompt_keep,
                "prompt_hash": call.prompt_hash,
                "branch_reason": None if call.branch_reason is None else call.branch_reason.value,
                "n_prompt": raw.n_prompt,
                "n_delta": len(call.prompt_delta),
                "n_generated": len(call.generation_token_ids),
                "prompt_delta": compress(raw.delta),
                "generation": compress(raw.generation),
                "log_probs": None if packed.values is None else compress(packed.values),
                "log_prob_valid": None if packed.valid is None else compress(packed.valid),
                "log_prob_width": packed.width,
                "log_prob_kind": None if call.log_prob_kind is None else call.log_prob_kind.value,
                "versions": canonical([[s.version, s.start, s.end] for s in call.policy_versions]),
                "sampling": to_json(call.sampling).decode(),
                "finish_reason": call.finish_reason.value,
                "model": call.model,
                "view_hash": call.view_hash,
                "started_at": call.started_at,
                "finished_at": call.finished_at,
            }
        )
    return rows


def _call(row: Row) -> ModelCall:
    n = row["n_generated"]
    spans = _parse(row["versions"])
    if not isinstance(n, int) or not isinstance(row["n_delta"], int) or not isinstance(spans, list):
        raise EvidenceError(f"call {row['id']}: its counts or versions are not what was written")
    valid = row["log_prob_valid"]
    return from_dict(
        ModelCall,
        {
            "id": row["id"],
            "parent_id": row["parent_id"],
            "prompt_keep": row["prompt_keep"],
            "prompt_delta": ids_from_bytes(decompress(row["prompt_delta"], size=row["n_delta"] * _ID_BYTES)),
            "prompt_hash": row["prompt_hash"],
            "branch_reason": row["branch_reason"],
            "generation_token_ids": ids_from_bytes(decompress(row["generation"], size=n * _ID_BYTES)),
            "generation_log_probs": unpack_log_probs(
                LogProbColumns(
                    values=None if row["log_probs"] is None else decompress(row["log_probs"]),
                    valid=None if valid is None else decompress(valid, size=(n + 7) // 8),
                    width=row["log_prob_width"],
                ),
                n,
            ),
            "log_prob_kind": row["log_prob_kind"],
            "policy_versions": tuple({"version": v, "start": a, "end": b} for v, a, b in spans),
            "sampling": _parse(row["sampling"]),
            "finish_reason": row["finish_reason"],
            "model": row["model"],
            "view_hash": row["view_hash"],
            "started_at": row["started_at"],
            "finished_at": row["finished_at"],
        },
    )


def _action_rows(trajectory: Trajectory) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for at, turn in enumerate(trajectory.turns):
        for position, action in enumerate(turn.actions):
            seen = turn.observations[position] if position < len(turn.observations) else None
            rows.append(
                {
                    "trajectory_id": trajectory.id,
                    "turn": at,
                    "position": position,
                    "tool": action.tool,
                    "unusable": int(action.error is not None),
                    "failed": None if seen is None else int(seen.is_error),
                    "status": None if seen is None or seen.status is None else seen.status.value,
                }
            )
    return rows


def _verdict_row(trajectory_id: str, verdict: Verdict) -> dict[str, Any]:
    plain = to_dict(verdict)
    return {
        "trajectory_id": trajectory_id,
        "reward": None if verdict.reward is None else canonical(verdict.reward),
        "components": canonical(plain["components"]),
        "evidence": canonical(plain["evidence"]),
        "fault": None if plain["fault"] is None else canonical(plain["fault"]),
        "grader_revision": verdict.grader_revision,
        "isolation": verdict.isolation,
        "tests": canonical(plain["tests"]),
        "flags": canonical(plain["flags"]),
        "signature": verdict.signature,
    }


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError) as error:
        raise EvidenceError(f"a stored JSON column can not be read: {error}") from error


def _require_json(value: object, where: str) -> None:
    """Refuse what canonical JSON would change in silence. Tuples pass: JSON has one kind of sequence."""
    if value is None or isinstance(value, (str, bool, int)):
        return
    if isinstance(value, float):
        if math.isfinite(value):
            return
        raise StoreError(f"{where}: {value} is not JSON.", fix="Leave an unknown number out instead.")
    if isinstance(value, (list, tuple)):
        for item in value:
            _require_json(item, where)
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise StoreError(
                    f"{where}: key {key!r} is not a string.", fix="JSON objects have string keys."
                )
            _require_json(item, where)
        return
    raise StoreError(
        f"{where}: a {type(value).__name__} is not JSON.", fix="Use str, numbers, lists and dicts."
    )
