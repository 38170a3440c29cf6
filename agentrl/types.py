"""The records: one definition for wire, disk and memory. Frozen, slotted, keyword-only, validated, unknown
keys refused. A new type at each stage; nothing is written into a record after it is made.

Legend used in all docstrings: `T` tokens of one call, `N` action (sampled) tokens of a batch in sampled
order, `S` trajectories, `G` members of a group. Log-probs are natural logs in float32; times are Unix
seconds.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import fields
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, AwareDatetime, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from agentrl.errors import EvidenceError, FaultOwner

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)

TokenId = Annotated[int, Field(ge=0)]
JsonScalar = str | int | float | bool | None


def storable(text: str) -> str:
    """Text from anywhere, a file name or a model's words: what UTF-8 can not hold of it is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


Storable = Annotated[str, AfterValidator(storable)]
R = TypeVar("R")


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}
"""Built once per record type: building one is slow."""


def _adapter(record_type: type[Any]) -> TypeAdapter[Any]:
    adapter = _ADAPTERS.get(record_type)
    if adapter is None:
        adapter = _ADAPTERS[record_type] = TypeAdapter(record_type)
    return adapter


def to_json(record: object) -> bytes:
    """Canonical JSON of a record: compact, field order of the class, no NaN. The input of every content
    hash."""
    return _adapter(type(record)).dump_json(record)


def to_dict(record: object) -> dict[str, Any]:
    """The record as plain JSON-able Python."""
    value: dict[str, Any] = _adapter(type(record)).dump_python(record, mode="json")
    return value


def from_json(record_type: type[R], data: bytes | str) -> R:
    """Parse and validate; `EvidenceError` names the field that is wrong."""
    try:
        value: R = _adapter(record_type).validate_json(data)
    except pydantic.ValidationError as error:
        raise EvidenceError(_explain(record_type, error)) from error
    return value


def from_dict(record_type: type[R], data: dict[str, Any]) -> R:
    """Like `from_json` for already parsed data."""
    try:
        value: R = _adapter(record_type).validate_python(data)
    except pydantic.ValidationError as error:
        raise EvidenceError(_explain(record_type, error)) from error
    return value


def _explain(record_type: type[Any], error: pydantic.ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or record_type.__name__
    return f"{record_type.__name__}: {where}: {first['msg']}"


def content_hash(*parts: bytes) -> str:
    """sha256 over length-prefixed parts, in hex."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def token_hash(ids: tuple[int, ...]) -> str:
    """sha256 of a token sequence (32-bit little-endian ids), in hex: what a prompt is compared by."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


# ---------------------------------------------------------------------------------------------------- tasks


class Split(StrEnum):
    TRAIN = "train"
    HELDOUT = "heldout"


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class SandboxSpec:
    """What a task asks of its sandbox. All limits are mandatory: a sandbox without one is a programming
    error."""

    image: str
    """Backend-neutral image name; for folder-built images `dir:<sha256 of the environment folder>`."""
    workdir: str = "/app"
    cpus: Annotated[float, Field(gt=0)] = 1.0
    memory_mib: Annotated[int, Field(gt=0)] = 1024
    disk_mib: Annotated[int, Field(gt=0)] = 256
    pids: Annotated[int, Field(gt=0)] = 128
    network: Literal["none", "allowlist", "public"] = "none"
    env: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class GraderUse:
    """One grader of a task: `use` names it, `name` is its component of the reward."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    use: str
    weight: Annotated[float, Field(ge=0)] = 1.0
    options: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class GraderSpec:
    """How a task is graded. `tests`: outcomes by name from our runner; `script`: the Harbor contract
    (tests/test.sh); `environment`: the `grade()` of a tool environment, on an untouched instance; `graders`:
    the weighted sum of the graders that are named."""

    kind: Literal["tests", "script", "environment", "graders"]
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    protected_paths: tuple[str, ...] = ()
    """Workspace paths restored from the original before grading, whatever the policy did to them."""
    graders: tuple[GraderUse, ...] = ()
    timeout_s: Annotated[float, Field(gt=0)] = 600.0


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Limits:
    """Budgets of one trajectory; each must be positive."""

    max_turns: Annotated[int, Field(gt=0)] = 32
    max_tokens: Annotated[int, Field(gt=0)] = 16_384
    """Generated tokens over the whole trajectory."""
    max_context: Annotated[int, Field(gt=0)] = 32_768
    """Prompt plus generation of one call."""
    wall_s: Annotated[float, Field(gt=0)] = 1800.0
    exec_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    observation_bytes: Annotated[int, Field(gt=0)] = 16_384
    """Model view of one observation; longer output keeps head and tail."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Task:
    """One problem with an environment and a way to grade it."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$")]
    """`suite/name`."""
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """sha256 of the package folder."""
    path: str
    """The package folder on this machine (not part of the task's identity)."""
    instruction: str
    sandbox: SandboxSpec
    tools: tuple[str, ...]
    grader: GraderSpec
    limits: Limits
    clock: AwareDatetime | None = None
    """The time of day at which each of its sandboxes starts; None: the machine's own."""
    split: Split = Split.TRAIN
    difficulty: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


# ------------------------------------------------------------------------------------------------ model calls


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token was sampled; it is the last generated id."""
    STOP_STRING = "stop_string"
    """A stop string was completed by the last generated id, which is kept whole."""
    LENGTH = "length"
    """The token budget of the call ended it."""
    ABORT = "abort"
    """The engine was told to stop (cancel, weight update with abort)."""


class LogProbKind(StrEnum):
    PROCESSED = "processed"
    """Of the distribution that was really sampled (temperature and truncation applied)."""
    RAW = "raw"
    """Of the untouched logits: equals PROCESSED only at temperature 1 without truncation."""


class BranchReason(StrEnum):
    """Why a call does not extend its parent's tokens. Never silent."""

    COMPACTION = "compaction"
    TRUNCATION = "truncation"
    REASONING_DROPPED = "reasoning_dropped"
    HISTORY_EDITED = "history_edited"
    SUB_AGENT = "sub_agent"
    TEMPLATE = "template"
    RESAMPLED = "resampled"


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class SamplingParams:
    """How tokens were drawn. `top_p`, `top_k` other than off make log-probs those of a truncated
    distribution."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 means greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 means off."""
    max_tokens: Annotated[int, Field(gt=0)] = 1024
    stop_token_ids: tuple[TokenId, ...] = ()
    seed: int | None = None

    @property
    def trainable(self) -> bool:
        """Whether full-vocabulary log-probs at `temperature` are those of the sampled distribution."""
        return self.temperature > 0 and self.top_p == 1.0 and self.top_k == 0


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class VersionSpan:
    """Generated tokens `start` (inclusive) to `end` (exclusive) came from policy `version`."""

    version: Annotated[int, Field(ge=0)]
    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class ModelCall:
    """One request to the policy: what it saw, what it sampled, with which probability, from which version.

    The prompt is stored as a delta: `prompt = (parent.prompt + parent.generation)[:prompt_keep] +
    prompt_delta` (`Trajectory.prompt_ids` rebuilds it). `prompt_keep == len(parent.prompt) +
    len(parent.generation)` means that the call extends its parent; anything less is a branch and has a
    `branch_reason`.

    Worked example: call a: parent None, keep 0, delta (9, 4), generation (7, 2). Call b extends it with an
    observation (5, 4): parent a, keep 4, delta (5, 4); its prompt is (9, 4, 7, 2, 5, 4).
    """

    id: str
    parent_id: str | None = None
    prompt_keep: Annotated[int, Field(ge=0)] = 0
    prompt_delta: tuple[TokenId, ...]
    prompt_hash: str
    """`token_hash` of the whole prompt, as echoed by the engine."""
    branch_reason: BranchReason | None = None
    generation_token_ids: tuple[TokenId, ...]
    generation_log_probs: tuple[float | None, ...] | None
    """One per generated token. None for the whole call: the sampler has none (a scripted demonstrator).
    None at one
    token: the engine reported -inf or nothing there; that token can not enter a loss. Never 0.0 as a
    placeholder."""
    log_prob_kind: LogProbKind | None
    policy_versions: tuple[VersionSpan, ...]
    """Run-length coded, covering all generated tokens; empty when the sampler has no version."""
    sampling: SamplingParams
    finish_reason: FinishReason
    model: str
    view_hash: str
    """sha256 of the messages and tools that were rendered."""
    started_at: float
    finished_at: float

    def __post_init__(self) -> None:
        n = len(self.generation_token_ids)
        if n == 0:
            raise ValueError("a call without generated tokens is not evidence")
        if self.generation_log_probs is not None:
            if len(self.generation_log_probs) != n:
                raise ValueError(f"{len(self.generation_log_probs)} log-probs for {n} generated tokens")
            if any(p is not None and p > 1e-4 for p in self.generation_log_probs):
                raise ValueError("a log-prob is above 0")
            if self.log_prob_kind is None:
                raise ValueError("log-probs without their kind (raw or processed)")
        at = 0
        for span in self.policy_versions:
            if span.start != at or span.end <= span.start:
                raise ValueError("policy versions must cover the generated tokens in order, without gaps")
            at = span.end
        if self.policy_versions and at != n:
            raise ValueError(f"policy versions cover {at} of {n} generated tokens")
        if self.parent_id is None and (self.prompt_keep or not self.prompt_delta):
            raise ValueError("empty_prompt: a root call has its own whole prompt")
        if self.finished_at < self.started_at:
            raise ValueError("finished before it started")

    def versions_T(self) -> tuple[int, ...]:
        """Policy version per generated token `[T]`; empty when unknown."""
        return tuple(s.version for s in self.policy_versions for _ in range(s.end - s.start))


# ------------------------------------------------------------------------------------------------------ turns


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Action:
    """What the harness made of sampled tokens: a tool call, or a format error (`error` says what was
    unusable)."""

    id: str
    tool: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    error: str | None = None


class ExecStatus(StrEnum):
    EXITED = "exited"
    SIGNALED = "signaled"
    TIMEOUT = "timeout"
    KILLED = "killed"
    OOM = "oom"
    UNKNOWN = "unknown"
    """The outcome can not be known. Never read as success."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Observation:
    """What an action caused. `text` is exactly what the model is shown."""

    action_id: str
    text: str
    is_error: bool = False
    status: ExecStatus | None = None
    exit_code: int | None = None
    wall_ms: float | None = None
    queue_ms: float | None = None
    truncated_bytes: Annotated[int, Field(ge=0)] = 0
    data: dict[str, Any] = Field(default_factory=dict)
    """Tool-specific facts for reports and graders (for `run_tests`: passed, failed)."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Turn:
    """A call, the actions parsed from it, the observations they caused: one per action, in order."""

    call_id: str
    actions: tuple[Action, ...]
    observations: tuple[Observation, ...]

    def __post_init__(self) -> None:
        if [a.id for a in self.actions][: len(self.observations)] != [o.action_id for o in self.observations]:
            raise ValueError("observations must answer the actions one by one, in order")


# ------------------------------------------------------------------------------------------- faults, verdicts


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Fault:
    """Something that went wrong, and whose it is. The owner is never read off stdout, stderr or an exit
    code."""

    owner: FaultOwner
    code: str
    phase: str
    retryable: bool
    message: Storable
    evidence: dict[Storable, Storable | int | float | bool | None] = Field(default_factory=dict)

    SCORED: ClassVar[frozenset[str]] = frozenset({"policy", "budget"})

    @property
    def scored(self) -> bool:
        return self.owner in self.SCORED


class EvidenceKey(StrEnum):
    """The chain of evidence behind a reward (gateway design, §3). All must hold, or there is no reward."""

    E1_START = "E1_start"
    E2_PROBE_BEFORE = "E2_probe_before"
    E3_SAME_INSTANCE = "E3_same_instance"
    E4_EXECS_FRAMED = "E4_execs_framed"
    E5_NO_FOREIGN_LOSS = "E5_no_foreign_loss"
    E6_PROBE_AFTER = "E6_probe_after"
    E7_FRESH_VERIFIER = "E7_fresh_verifier"
    E8_REPORT_COMPLETE = "E8_report_complete"
    E9_REWARD_FINITE = "E9_reward_finite"
    E10_TASK_VALIDATED = "E10_task_validated"


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Evidence:
    """One link: whether it holds, and the facts seen. `holds=None` means unknown, which is not true."""

    key: EvidenceKey
    holds: bool | None
    facts: dict[str, JsonScalar] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class TestOutcome:
    """One test by name. Anything but `passed` is not passed."""

    name: str
    outcome: Literal["passed", "failed", "error", "skipped", "missing"]
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Verdict:
    """What a trajectory earned. A reward exists only if every piece of evidence holds."""

    reward: float | None
    components: dict[str, float] = Field(default_factory=dict)
    evidence: tuple[Evidence, ...]
    fault: Fault | None
    grader_revision: str
    isolation: Literal["namespaces", "docker", "kubernetes", "none"]
    tests: tuple[TestOutcome, ...] = ()
    flags: tuple[str, ...] = ()
    signature: str = ""
    """HMAC-SHA256 over the verdict without this field; empty until signed."""

    def __post_init__(self) -> None:
        if self.reward is not None:
            if not math.isfinite(self.reward):
                raise ValueError("a reward must be finite")
            if self.fault is not None and not self.fault.scored:
                raise ValueError(f"a reward beside a fault of the {self.fault.owner}")
            missing = set(EvidenceKey) - {e.key for e in self.evidence if e.holds is True}
            if missing:
                raise ValueError(f"a reward without evidence: {', '.join(sorted(missing))}")
        elif self.fault is None:
            raise ValueError("no reward needs a fault that says why")

    @property
    def step_rewards(self) -> dict[int, float]:
        """The parts of the reward that single steps earned, by the number of the step: those components whose
        name is, or ends with, `step/NNNN`. A step is a call that reached the environment; the first is 0."""
        earned: dict[int, float] = {}
        for name, value in self.components.items():
            number = step_number(name)
            if number is not None:
                earned[number] = earned.get(number, 0.0) + value
        return earned


def step_number(component: str) -> int | None:
    """Which step a component of a reward is of: 3 for `step/0003` and for `care/step/0003`, None for
    others."""
    _, mark, number = f"/{component}".rpartition("/step/")
    return int(number) if mark and number.isdecimal() else None


# ----------------------------------------------------------------------------------------------- trajectories


class Termination(StrEnum):
    """Why a trajectory ended. Never merged into one zero."""

    FINISHED = "finished"
    """The policy said that it is done (submit, or a final answer)."""
    SUCCESS = "success"
    """The verifier stopped it: the goal was reached."""
    MAX_TURNS = "max_turns"
    """The turn budget ran out."""
    MAX_TOKENS = "max_tokens"
    """The budget of generated tokens ran out."""
    CONTEXT_FULL = "context_full"
    """The next prompt would not fit the context."""
    WALL_CLOCK = "wall_clock"
    """The time budget ran out; the partial state is graded."""
    FORMAT = "format"
    """Unusable output too often in a row."""
    CANCELLED = "cancelled"
    """Stopped from outside (Ctrl-C, group closed); not evidence of anything."""
    FAULT = "fault"
    """Something that is not the policy's failed; no reward."""

    @property
    def truncated(self) -> bool:
        """Ended by a budget while the environment was healthy: the state has a future, so its value
        bootstraps."""
        return self in (
            Termination.MAX_TURNS,
            Termination.MAX_TOKENS,
            Termination.CONTEXT_FULL,
            Termination.WALL_CLOCK,
        )

    @property
    def terminated(self) -> bool:
        """Ended by the policy or the verifier: nothing comes after."""
        return self in (Termination.FINISHED, Termination.SUCCESS, Termination.FORMAT)


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Trajectory:
    """Everything one attempt at one task left behind. `calls` is a tree in sampled order: parents before
    children."""

    id: str
    task_id: str
    task_revision: str
    group_id: str
    index: Annotated[int, Field(ge=0)]
    """Member number in its group."""
    harness: str
    """Harness name and version, e.g. `tool-agent/1`."""
    split: Split
    calls: tuple[ModelCall, ...]
    turns: tuple[Turn, ...]
    termination: Termination
    verdict: Verdict
    started_at: float
    finished_at: float
    metadata: dict[str, JsonScalar] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        length: dict[str, int] = {}
        for call in self.calls:
            if call.parent_id is not None and call.parent_id not in length:
                raise ValueError(f"call {call.id}: its parent comes later or is missing")
            whole = length[call.parent_id] if call.parent_id is not None else 0
            if call.prompt_keep > whole:
                raise ValueError(f"call {call.id} keeps {call.prompt_keep} of {whole} tokens")
            if call.parent_id is not None and call.prompt_keep < whole and call.branch_reason is None:
                raise ValueError(f"call {call.id} leaves its parent's tokens without a reason")
            if call.id in length:
                raise ValueError(f"call id {call.id} twice")
            length[call.id] = call.prompt_keep + len(call.prompt_delta) + len(call.generation_token_ids)
        for turn in self.turns:
            if turn.call_id not in length:
                raise ValueError(f"turn of unknown call {turn.call_id}")
        unscored = self.verdict.fault is not None and self.verdict.reward is None
        if self.termination is Termination.FAULT and not unscored:
            raise ValueError("a trajectory ended by a fault has that fault and no reward")

    @property
    def reward(self) -> float | None:
        return self.verdict.reward

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """What the steps of each turn earned, a part of `reward`; zeros where no grader rewards steps.

        A step is an action that reached the environment and was answered: not one with an error of form.

        Raises:
            ValueError: a step was rewarded that is in no turn: the harness did not note what was done.
        """
        left = self.verdict.step_rewards
        number, found = 0, []
        for turn in self.turns:
            answered = turn.actions[: len(turn.observations)]
            steps = range(number, number + sum(action.error is None for action in answered))
            found.append(math.fsum(left.pop(step, 0.0) for step in steps))
            number = steps.stop
        if left:
            raise ValueError(f"step {min(left)} was rewarded, and the turns hold {number} steps")
        return tuple(found)

    def call(self, call_id: str) -> ModelCall:
        return next(c for c in self.calls if c.id == call_id)

    def prompt_ids(self, call_id: str) -> tuple[int, ...]:
        """The exact prompt of a call, rebuilt along its parents. Linear in the length of the prompt."""
        by_id = {c.id: c for c in self.calls}
        pieces: list[tuple[int, ...]] = []
        call: ModelCall | None = by_id[call_id]
        limit: int | None = None
        while call is not None:
            start = call.prompt_keep
            last = limit is None
            tail = call.prompt_delta if last else call.prompt_delta + call.generation_token_ids
            if limit is None:
                pieces.append(tail)
                limit = start
            elif limit > start:
                pieces.append(tail[: limit - start])
                limit = start
            call = by_id[call.parent_id] if call.parent_id is not None else None
        return tuple(i for piece in reversed(pieces) for i in piece)


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Group:
    """Trajectories of one task sampled to be compared."""

    id: str
    task_id: str
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise ValueError("an empty group")
        for t in self.trajectories:
            if t.task_id != self.task_id or t.group_id != self.id:
                raise ValueError(f"trajectory {t.id} is of task {t.task_id}, group {t.group_id}")


# --------------------------------------------------------------------------------------------------- versions


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class PolicyVersion:
    """One published state of the policy. `number == parent + 1`; version 0 has no parent."""

    number: Annotated[int, Field(ge=0)]
    parent: int | None
    step: Annotated[int, Field(ge=0)]
    """Optimizer steps taken when it was published."""
    location: str
    content_hash: str
    config_hash: str
    published_at: float

    def __post_init__(self) -> None:
        if self.number != (0 if self.parent is None else self.parent + 1):
            raise ValueError(f"version {self.number} of parent {self.parent}")


RECORDS = (Task, ModelCall, Turn, Verdict, Trajectory, Group, PolicyVersion)


def field_names(record_type: type[Any]) -> tuple[str, ...]:
    """Field names of a record, in order (used by generated docs)."""
    return tuple(f.name for f in fields(record_type))
