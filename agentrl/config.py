"""One run file, one page: what a run is, strictly typed. A typo is an error that names the nearest key.

A run file is TOML. Sections are the classes below; every key has a default, so a run file says only what
differs.
`load` reads a file, lays `--set section.key=value` over it and refuses what is unknown or impossible before
anything starts. Environment variables are read here and nowhere else.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from agentrl.errors import ConfigError, nearest
from agentrl.types import content_hash

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
BackendName = Literal["local", "plain", "docker", "kubernetes"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunSection(_Section):
    """What the run is called and where it lives."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "run"
    seed: NonNegative = 1
    dir: str = ""
    """Folder of everything the run leaves; empty: `runs/<name>`."""
    store: str = ""
    """Store URL (`postgresql://…`, `sqlite:///…`); empty: `<dir>/store.db`."""
    threads: NonNegative = 0
    """Threads of the CPU learner and sampler; 0: as many as torch takes. Small policies want 1: several
    threads wait for each other longer than they compute."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy is trained, and sampled in this process. auto: a GPU where there is one. Under
    `torchrun` each process takes the GPU of its local rank."""

    @property
    def folder(self) -> Path:
        return Path(self.dir or f"runs/{self.name}")

    @property
    def store_url(self) -> str:
        return self.store or f"sqlite:///{(self.folder / 'store.db').absolute()}"


class TasksSection(_Section):
    """Which tasks are trained on and which are held out."""

    suite: str = "swe_mini"
    """`swe_mini` (generated for the run), `env:NAME` (a registered environment), or a folder of packages."""
    train: Positive = 300
    """Tasks to generate for training (a folder: at most so many are used)."""
    heldout: Positive = 96
    """Tasks to generate that are never trained on."""
    demonstrated: NonNegative = 0
    """Further tasks to generate that only the demonstrator attempts (not admitted, so nothing is earned on
    them);
    0: it attempts the training tasks. The more different ones it shows, the better its imitator
    generalizes."""
    admission: Literal["light", "full", "stored"] = "light"
    """`full`: solution and empty attempt three times, and the exploit battery. `light`: once, for generated
    suites.
    `stored`: only what an earlier validation left in the store."""


class SandboxSection(_Section):
    """Where actions happen."""

    backend: BackendName = "local"
    fall_back_to_plain: bool = False
    """Where the kernel refuses isolation, go on with plain subprocesses and a notice; verdicts say so. Only
    for tasks that are the run's own."""
    prepare: bool = True
    """Have the images of all tasks made ready before the policy is loaded, so that one that can not be had
    ends the run there. False: each when it is first needed, for suites that do not fit the disk at once."""
    concurrency: Positive = 32
    """Attempts alive at once."""
    warm: Annotated[int, Field(ge=0)] = 0
    """Sandboxes kept started for attempts to come: one for each of the last so many, of the same image and
    limits. Worth it where attempts use the same image again. With the docker and kubernetes backends."""
    gateway: Annotated[str, Field(pattern=r"^(https?://.+)?$")] = ""
    """URL of an environment gateway (`agentrl serve gateway`) that makes the sandboxes in place of `backend`.
    It must have the run's tasks; its token is read from `AGENTRL_GATEWAY_TOKEN`."""


class SmallPolicy(_Section):
    """A Llama-architecture model built in the run, with its tokenizer, for machines without a model or a
    GPU."""

    hidden_size: Positive = 160
    layers: Annotated[int, Field(ge=2)] = 2
    heads: Annotated[int, Field(ge=2)] = 4
    head_dim: Positive = 64
    vocabulary: Annotated[int, Field(ge=300)] = 1000
    context: Positive = 2048


class ServerSection(_Section):
    """vLLM servers that sample the policy in place of this process, all of one model. They see the run's
    folder under the same path."""

    urls: tuple[Annotated[str, Field(pattern=r"^https?://.+")], ...] = ()
    """Base URLs; none: the policy is sampled in this process. Their key is read from `AGENTRL_SERVER_KEY`."""
    in_flight: Literal["keep", "abort", "wait"] = "keep"
    """What new weights do to requests in flight. keep: they go on under them. abort: they are taken up again
    after. wait: they finish first."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long the servers may take to come up."""


class PolicySection(_Section):
    """The policy that is trained."""

    source: str = "small"
    """`small` (see `policy.small`), or a Hugging Face causal LM by folder or hub id."""
    tool_parser: str = "hermes"
    small: SmallPolicy = SmallPolicy()
    server: ServerSection = ServerSection()


class ColdstartSection(_Section):
    """Imitation of a scripted, imperfect demonstrator before reinforcement learning."""

    demonstrations: NonNegative = 0
    """How many to record; 0: no cold start."""
    epochs: Positive = 8
    batch: Positive = 4
    """Trajectories per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1.5e-3
    careful: Share = 0.4
    """In how many attempts the demonstrator runs the tests after every edit."""
    give_up: Share = 0.25
    """How often it submits after failing tests instead of trying another alternative."""
    change_mind: Share = 0.5
    """How often it edits again where it does not run the tests."""
    threads: NonNegative = 0
    """Threads of the imitation; 0: `run.threads`. No sandbox wants the processors meanwhile."""


class RolloutSection(_Section):
    """How trajectories are sampled."""

    groups: Positive = 8
    """Groups (tasks) per update."""
    group_size: Positive = 8
    """Trajectories per group."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    max_tokens: Positive = 1024
    """Generated tokens of one call."""
    agent: Literal["tool-agent", "mini-swe-agent", "shell-loop"] = "tool-agent"
    """Who acts. `tool-agent` is built in; `mini-swe-agent` and `shell-loop` are programs that run in the
    task's sandbox, unmodified, and are recorded through the model proxy."""
    agent_folder: str = ""
    """Where `pip install --target` put such a program, for the Python of the sandbox; empty: the image has
    it."""
    context: Literal["none", "window", "observations", "summary"] = "none"
    """What happens to a history that outgrows the context. window: the oldest turns are forgotten.
    observations: old ones are cut. summary: the policy sums up, and that is trained too. Each is a branch."""
    context_tokens: NonNegative = 0
    """Longest prompt before that happens; 0: three quarters of the context."""
    nudges: NonNegative = 0
    """How often a reply without a tool call is answered with a reminder instead of ending the attempt."""
    max_lag: NonNegative = 0
    """Staleness bound in policy versions. 0: synchronous. n: sampling runs up to n updates ahead of
    training."""


class AdapterSection(_Section):
    """Adapters (LoRA) in place of all weights: the policy's own stay as they are, bit by bit, and what is
    published is the sum. Needs `pip install 'agentrl[lora]'`."""

    rank: NonNegative = 0
    """Of the two factors beside each layer; 0: no adapters, all weights are trained."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """What the adapter's product is multiplied by, over `rank`."""
    targets: tuple[str, ...] = ()
    """Names of the layers that get one (`q_proj`); none: every projection of attention and MLP."""


class TrainSection(_Section):
    """What is optimized and how."""

    recipe: str = "grpo"
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Axis choices and numbers of the recipe to change (see `agentrl recipes`)."""
    updates: NonNegative = 20
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    critic_learning_rate: Annotated[float, Field(gt=0)] | None = None
    critic_warmup_updates: NonNegative = 0
    """Updates that train only the critic before the policy moves (value pre-training); a recipe without one
    has none."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    warmup_steps: NonNegative = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate, over all updates of the run: held, or down to 0."""
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = 0.999
    mini_batches: Positive = 1
    epochs: Positive = 1
    token_budget: Positive = 16_384
    """Tokens of one micro-batch."""
    max_mismatch: Annotated[float, Field(gt=0)] = 0.1
    """Mean |Δ log-prob| between sampler and learner on the same weights above which a step is refused."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them: about a third more time for a fraction of the
    memory."""
    critic: Literal["separate", "shared"] = "separate"
    """A model of its own, or a head on the policy's; only for recipes that need values."""
    shard: bool = False
    """Spread weights, gradients and moments over the processes that `torchrun` starts (FSDP2); otherwise each
    has them all and computes its share of the tokens. Not with adapters."""
    lora: AdapterSection = AdapterSection()


class TeacherSection(_Section):
    """A frozen model that a recipe learns from, besides the reward."""

    source: str = ""
    """Folder or hub id of a Hugging Face causal LM with the policy's tokenizer, for recipes with a teacher
    (`opd`, `kdrl`, `hdpo` …). It scores what the policy sampled; it never acts."""


class EvalSection(_Section):
    """Evaluation on held-out tasks before and after training."""

    tasks: NonNegative = 0
    """Held-out tasks to attempt, once each; 0: no evaluation."""
    every: NonNegative = 0
    """Also after every so many updates; 0: only before and after."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    endpoint: Annotated[str, Field(pattern=r"^(https?://.+)?$")] = ""
    """Base URL of an OpenAI-compatible endpoint that `agentrl eval` puts in the place of the policy. Its
    key is read from `AGENTRL_ENDPOINT_KEY`; the tokenizer of `policy.source` only writes down what it
    says."""
    model: str = ""
    """The model's name at that endpoint."""


class KeepSection(_Section):
    """What stays on disk."""

    versions: Positive = 3
    """Newest published policy versions."""
    checkpoints: Positive = 2


class RunConfig(_Section):
    """A whole run file."""

    run: RunSection = RunSection()
    tasks: TasksSection = TasksSection()
    sandbox: SandboxSection = SandboxSection()
    policy: PolicySection = PolicySection()
    coldstart: ColdstartSection = ColdstartSection()
    rollout: RolloutSection = RolloutSection()
    train: TrainSection = TrainSection()
    teacher: TeacherSection = TeacherSection()
    eval: EvalSection = EvalSection()
    keep: KeepSection = KeepSection()

    @property
    def hash(self) -> str:
        """sha256 of all but where the run lives, who makes its sandboxes and serves it: equal hashes may
        resume."""
        elsewhere: dict[str, Any] = {
            "run": {"dir", "store", "device"},
            "sandbox": {"gateway", "warm"},
            "policy": {"server": {"urls", "start_timeout_s"}},
        }
        return content_hash(self.model_dump_json(exclude=elsewhere).encode())


def load(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """A run file with `section.key=value` overrides laid over it. Raises `ConfigError`, one sentence,
    nearest key."""
    file = Path(path)
    try:
        data = tomllib.loads(file.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"There is no run file {file}.", fix=_nearest_file(file)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} can not be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}.") from error
    return parse(data, overrides, where=str(file))


def parse(
    data: Mapping[str, Any], overrides: Sequence[str] = (), *, where: str = "the run file"
) -> RunConfig:
    """Already read data, validated. Raises `ConfigError`."""
    merged: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in data.items()}
    for override in overrides:
        _lay_over(merged, override)
    try:
        return RunConfig.model_validate(merged)
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(error, where)) from error


def _lay_over(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or len(path) < 2 or not all(path):
        raise ConfigError(
            f"'{override}' is not of the form section.key=value.", fix="Example: train.updates=30"
        )
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    here = data
    for part in path[:-1]:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise ConfigError(f"'{key}': {part} is not a section.")
    here[path[-1]] = value


def _explain(error: pydantic.ValidationError, where: str) -> str:
    first = error.errors(include_url=False)[0]
    loc = [str(part) for part in first["loc"]]
    key = ".".join(loc)
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key '{key}'. {nearest(loc[-1], _keys(loc[:-1]))}"
    given = first.get("input")
    return f"{where}: {key} = {given!r}: {first['msg']}."


def _keys(path: Sequence[str]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in path:
        annotation = model.model_fields[part].annotation
        options = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type)]
        model = next((a for a in options if issubclass(a, BaseModel)), model)
    return list(model.model_fields)


def _nearest_file(file: Path) -> str:
    here = [p.name for p in file.parent.glob("*.toml")] if file.parent.is_dir() else []
    return (
        nearest(file.name, here)
        if here
        else "Give the path of a run file, such as deploy/runs/quickstart.toml."
    )


def key_table() -> list[tuple[str, str, str]]:
    """Every key of a run file with its default and type, for generated docs."""
    rows: list[tuple[str, str, str]] = []

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            annotation = field.annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                walk(annotation, f"{prefix}{name}.")
                continue
            default = field.get_default(call_default_factory=True)
            rows.append((f"{prefix}{name}", repr(default), str(annotation).replace("typing.", "")))

    walk(RunConfig, "")
    return rows


def environment(name: str) -> str | None:
    """An `AGENTRL_<NAME>` environment variable; the only place where the environment is read."""
    return os.environ.get(f"AGENTRL_{name}")


def rank() -> int:
    """Of this process among those that `torchrun` started; 0 for one that was started alone."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes `torchrun` started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))
