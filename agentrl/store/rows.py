"""What the store answers with when a whole record would be too much: light rows, all frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agentrl.types import Split, Termination


class RunState(StrEnum):
    RUNNING = "running"
    """Begun and not finished; a killed run stays so, and a later run names it as its parent."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run. Everything up to `seal` is fixed when it begins."""

    id: str
    name: str
    algo: str
    seed: int
    config: Mapping[str, Any]
    config_hash: str
    parent_id: str | None
    """The run that this one resumes."""
    started_at: float
    seal: str
    """Hash of all above: the first link of the run's chains."""
    state: RunState
    finished_at: float | None
    trajectories: int
    head: str
    """Last link of the chain of trajectories. Note it elsewhere, and nobody can rewrite the run unseen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRow:
    """One trajectory without its tokens."""

    id: str
    run_id: str
    seq: int
    """1, 2, 3, ... in the order of adding, per run."""
    phase: str
    step: int | None
    """Optimizer step or round it belongs to; None: none."""
    group_id: str
    index: int
    task_id: str
    task_revision: str
    harness: str
    split: Split
    termination: Termination
    reward: float | None
    fault_owner: str | None
    fault_code: str | None
    turns: int
    calls: int
    tokens: int
    """Generated tokens over all calls."""
    min_version: int | None
    """Oldest policy version of any token; None: unknown."""
    max_version: int | None
    started_at: float
    finished_at: float
    content_hash: str
    chain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many trajectories ended how, and how many actions used which tool."""

    trajectories: int
    termination: Mapping[str, int]
    fault: Mapping[str, int]
    """By `owner/code`; trajectories without a fault are not in it."""
    tool: Mapping[str, int]
    tool_failed: Mapping[str, int]
    """Of those, the actions that were unusable or whose observation is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRow:
    """One optimizer update and the version it published (None: it published nothing)."""

    step: int
    trained_version: int | None
    published: int | None
    trajectories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessRow:
    """How old a trained trajectory was *when it was trained*, in policy versions. None: unknown.

    Worked example: submitted at version 5, tokens from versions 5 and 6, finished while 6 was the newest,
    trained at version 8: `submit` 3, `oldest_token` 3, `newest_token` 2, `queue` 2.
    """

    trajectory_id: str
    step: int
    trained_version: int | None
    submit: int | None
    oldest_token: int | None
    newest_token: int | None
    queue: int | None
    """Versions published between the end of the trajectory and its training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    step: int
    name: str
    value: float
    """May be NaN or infinite: what was measured."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """Something worth telling: a phase began, a fault was seen."""

    at: float
    kind: str
    message: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRow:
    """The outcome of validating one revision of a task."""

    task_id: str
    revision: str
    valid: bool
    facts: Mapping[str, Any]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A piece of work held until `lease_until` (Unix seconds of the database's clock)."""

    id: int
    run_id: str
    kind: str
    key: str
    payload: Mapping[str, Any]
    owner: str
    epoch: int
    """Which claim of this work it is, from 1: only the newest may complete it."""
    lease_until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` has checked, and the first thing that is not as it was written."""

    run_id: str
    trajectories: int
    calls_checked: int
    tokens_checked: int
    policy_versions: int
    updates: int
    signatures_checked: int
    """0 when no key was given."""
    head: str
    """Last link of the chain of trajectories."""
    broken_id: str | None
    """First broken trajectory (`#7`: the seventh is missing), `version 3`, `update 12`, `group x`, or the
    run."""
    why: str | None

    @property
    def ok(self) -> bool:
        return self.why is None
