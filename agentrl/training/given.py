"""What a run works with, made from its configuration: tasks, a sandbox backend, a tokenizer and a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentrl.algo.recipes import Recipe
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, SandboxError, nearest
from agentrl.learner import lora, small
from agentrl.learner import model as models
from agentrl.learner.batch import Packing
from agentrl.learner.step import Learner, LearnerConfig
from agentrl.training import ranks
from agentrl.training.events import Listener
from agentrl.training.folder import RunFolder
from agentrl.types import Split, Task
from envs import registry
from envs.sandbox.backends import checked, keep_warm
from envs.sandbox.contract import Backend
from envs.sandbox.local import LocalBackend
from envs.sandbox.plain import PlainBackend
from envs.tasks import swe_mini
from envs.tasks.package import load_suite
from harness.demonstrator import tool_call
from harness.gateway.remote import GatewayPlace
from harness.gold import written
from harness.prompt import SYSTEM_PROMPT

BACKENDS = ("local", "plain", "docker", "kubernetes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Disjoint by construction: no held-out task is ever trained on."""

    train: tuple[Task, ...]
    heldout: tuple[Task, ...]
    demonstrated: tuple[Task, ...] = ()
    """What the demonstrator attempts; the training tasks where the suite has no others."""

    def __post_init__(self) -> None:
        shown = {t.revision for t in (*self.train, *self.demonstrated)}
        shared = shown & {t.revision for t in self.heldout}
        if shared:
            raise ConfigError(
                f"{len(shared)} held-out tasks are also training tasks.", fix="Split the suite anew."
            )


def tasks(config: RunConfig, folder: RunFolder) -> Tasks:
    """The generated suite (written once into the run's folder), an environment's tasks, or a folder's.

    Raises:
        ConfigError: an unknown suite, or a split without tasks that the run needs.
        TaskError: a broken package.
    """
    wanted = config.tasks
    if wanted.suite == swe_mini.SUITE:
        done = folder.tasks / ".complete"
        if not done.exists():
            swe_mini.generate(
                folder.tasks,
                train=wanted.train + wanted.demonstrated,
                heldout=wanted.heldout,
                seed=config.run.seed,
            )
            done.touch()
        found = load_suite(folder.tasks)
    elif wanted.suite.startswith(registry.PREFIX):
        found = registry.tasks(
            wanted.suite.removeprefix(registry.PREFIX),
            folder.tasks,
            train=wanted.train,
            heldout=wanted.heldout,
            seed=config.run.seed,
        )
    elif Path(wanted.suite).is_dir():
        found = load_suite(wanted.suite)
    else:
        raise ConfigError(
            f"tasks.suite = '{wanted.suite}' is neither a generated suite, nor env:NAME, nor a folder.",
            fix=nearest(wanted.suite, [swe_mini.SUITE]),
        )
    every = tuple(t for t in found if t.split is Split.TRAIN)
    train = every[: wanted.train]
    demonstrated = every[wanted.train :][: wanted.demonstrated]
    heldout = tuple(t for t in found if t.split is Split.HELDOUT)[: wanted.heldout]
    if not train:
        raise ConfigError(
            f"{wanted.suite} has no training tasks.", fix='Set split = "train" in their task.toml.'
        )
    if len(heldout) < config.eval.tasks:
        raise ConfigError(
            f"eval.tasks = {config.eval.tasks}, but {wanted.suite} has {len(heldout)} held-out tasks.",
            fix='Lower eval.tasks, or mark more packages with split = "heldout".',
        )
    return Tasks(train=train, heldout=heldout[: config.eval.tasks], demonstrated=demonstrated or train)


def backend(config: RunConfig, state_dir: Path, listener: Listener) -> Backend:
    """The sandbox backend, checked, with what it keeps ready. Raises `SandboxError` naming what the kernel
    refuses, unless the run falls back, and `ConfigError`."""
    place = _backend(config, state_dir, listener)
    keep_warm(place, config.sandbox.warm)
    return place


def _backend(config: RunConfig, state_dir: Path, listener: Listener) -> Backend:
    if config.sandbox.gateway:
        return GatewayPlace.connect(config.sandbox.gateway)
    name = config.sandbox.backend
    if name not in BACKENDS:
        raise ConfigError(
            f"sandbox.backend = '{name}' is not built in yet.", fix=f"Use {' or '.join(BACKENDS)}."
        )
    if name == "plain":
        listener.note("Sandboxes are plain subprocesses: no isolation, and every verdict says so.")
        return PlainBackend(state_dir)
    if name != "local":
        return checked(name, state_dir)
    local = LocalBackend(state_dir)
    try:
        local.check()
    except SandboxError as refused:
        if not config.sandbox.fall_back_to_plain:
            raise
        listener.note(
            f"{refused} Going on with plain subprocesses for this run's own tasks; every verdict says so."
        )
        return PlainBackend(state_dir)
    return local


def tokenizer(config: RunConfig, folder: RunFolder, suite: Sequence[Task]) -> Any:
    """The policy's tokenizer: saved in the run's folder when it was built there, else that of the source."""
    if config.policy.source != "small":
        return loaded_tokenizer(config.policy.source)
    if (folder.tokenizer / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder.tokenizer)
    made = small.build_tokenizer(_texts(suite), vocabulary=config.policy.small.vocabulary)
    made.save_pretrained(folder.tokenizer)
    return made


def loaded_tokenizer(source: str) -> Any:
    """The tokenizer of a folder or hub id. Raises `ConfigError` when there is none."""
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"'{source}' has no tokenizer that can be loaded.",
            fix="Give the folder or hub id of a Hugging Face causal LM, or 'small'.",
        ) from error


def _texts(suite: Sequence[Task]) -> list[str]:
    """What a small tokenizer learns its pieces from: instructions, files and the calls that will be made."""
    names = sorted({name for task in suite for name in task.tools})
    texts = [SYSTEM_PROMPT, "Tools: " + " ".join(names), *(tool_call(name) for name in names)]
    texts += ["system\nuser\nassistant\ntool\n"] * len(suite)
    for task in suite:
        texts.append(task.instruction)
        environment = registry.of_task(task)
        if environment is not None:
            texts += [written(step) for step in environment.problem(int(task.metadata["seed"])).gold]
            continue
        for file in sorted((Path(task.path) / "environment").rglob("*.py")):
            texts.append(file.read_text())
            texts.append(tool_call("read_file", path=file.name))
        line = str(task.metadata.get("buggy", ""))
        texts.append(tool_call("replace_in_file", path="a.py", old=line, new=line))
        texts.append(f"PASSED 3/3\nFAILED 1/3\nFAILED test_a: 3 != 4\nReplaced in a.py:\n    {line}")
    return texts


def policy(config: RunConfig, made_tokenizer: Any) -> Any:
    """Float32 master weights of the policy, where they are trained. Raises `ConfigError` when the source can
    not be loaded."""
    here = ranks.device(config)
    if config.policy.source != "small":
        return models.load(config.policy.source, device=here)
    shape = config.policy.small
    made = small.build_model(
        vocabulary=len(made_tokenizer),
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        heads=shape.heads,
        head_dim=shape.head_dim,
        context=shape.context,
        seed=config.run.seed,
    )
    return made.to(here)


def settle(config: RunConfig) -> None:
    """The random state and the threads of this process."""
    torch.manual_seed(config.run.seed)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)


def learner(config: RunConfig, recipe: Recipe, model: Any, made_tokenizer: Any) -> Learner:
    """The learner of a run, with the models that its recipe compares the policy with. Raises
    `ConfigError`."""
    train = config.train
    imitates = config.coldstart.demonstrations > 0
    reference = None
    if recipe.needs_reference and (imitates or not train.lora.rank):  # else it is the adapters' base
        reference = policy(config, made_tokenizer)
    settings = LearnerConfig(
        learning_rate=train.learning_rate,
        critic_learning_rate=train.critic_learning_rate,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        warmup_steps=train.warmup_steps,
        mini_batches=train.mini_batches,
        epochs=train.epochs,
        betas=(0.9, train.adam_beta2),
        max_lag=config.rollout.max_lag,
        max_mismatch=train.max_mismatch,
        packing=Packing(token_budget=train.token_budget, share_prefixes=True),
        compute_dtype=train.compute_dtype,
        gradient_checkpointing=train.gradient_checkpointing,
        critic=train.critic,
        shard=train.shard,
        seed=config.run.seed,
    )
    return Learner(
        trained(config, model),
        recipe,
        replace(settings, schedule=train.schedule, total_steps=settings.optimizer_steps(train.updates)),
        reference=reference,
        teacher=teacher(config, made_tokenizer) if recipe.needs_teacher else None,
        vocab_size=len(made_tokenizer),
    )


def trained(config: RunConfig, model: Any) -> Any:
    """The policy as the learner takes it: itself, or with the adapters of the run file on it. Raises
    `ConfigError`."""
    wanted = config.train.lora
    if not wanted.rank:
        return model
    return lora.adapt(model, rank=wanted.rank, alpha=wanted.alpha, targets=wanted.targets or lora.PROJECTIONS)


def teacher(config: RunConfig, policys: Any) -> Any:
    """The frozen teacher of a run.

    Args:
        policys: the policy's tokenizer; the teacher's must give the same ids the same words.

    Raises:
        ConfigError: none is named, it can not be loaded, or its tokenizer is another.
    """
    source = config.teacher.source
    if not source:
        raise ConfigError("The recipe needs a teacher.", fix="Set teacher.source.")
    mine, theirs = policys.get_vocab(), loaded_tokenizer(source).get_vocab()
    if mine != theirs:
        differing = sum(theirs.get(word) != number for word, number in mine.items())
        raise ConfigError(
            f"The tokenizer of teacher '{source}' is another: {differing} of {len(mine)} tokens differ.",
            fix="Give a teacher with the policy's tokenizer: its log-probs are of the policy's ids.",
        )
    return models.load(source, device=ranks.device(config))
