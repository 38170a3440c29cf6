"""One learner on several processes, as `torchrun` starts them: rank 0 does the run, and what it asks of its
learner is done by all.

Rank 0 samples, grades and stores. The others wait, each with its share of the work: rank 0 tells them a
function and its arguments, all call it on their learner at once, and its collective operations meet. What is
told goes over a group of its own, which may be silent for as long as sampling takes; a rank whose peer has
died is woken by the closed connection, and `torchrun` ends the rest. Alone, nothing is told to anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import distributed

from agentrl import config as configuration
from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.learner import checkpoint, publish
from agentrl.learner.checkpoint import Resumed
from agentrl.learner.step import Learner
from agentrl.types import PolicyVersion

P = ParamSpec("P")
T = TypeVar("T")

SILENCE = timedelta(days=7)
"""Longest time between two updates."""


def device(config: RunConfig) -> torch.device:
    """Where this process computes. Raises `ConfigError` for a GPU that is not there."""
    wanted = config.run.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    here, count = configuration.local_rank(), torch.cuda.device_count()
    if here >= count:
        raise ConfigError(
            f"run.device = '{wanted}': torch sees {count} GPUs here, and local rank {here} needs one of its"
            " own.",
            fix="Start as many processes as there are GPUs, or set run.device to cpu.",
        )
    return torch.device("cuda", here)


class PeerLost(AgentRLError):
    """A process that this one works with has ended before it said so."""


@contextmanager
def _peers() -> Iterator[None]:
    """What their connections say in the middle of a work, as `PeerLost`."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        raise PeerLost(
            "Another process of this run is gone.",
            fix="See what it said last. Go on with the same command and --resume.",
        ) from error


class Team:
    """All ranks of a run, seen from one of them."""

    def __init__(self, words: distributed.ProcessGroup | None) -> None:
        self._words = words
        """None: there is only this one."""
        self._busy = False

    def tell(self, told: Any) -> None:
        """Rank 0: what the others `hear`."""
        if self._words is not None:
            distributed.broadcast_object_list([told], src=0, group=self._words)

    def hear(self) -> Any:
        """Other ranks: wait for what rank 0 tells. Raises `PeerLost`."""
        told = [None]
        with _peers():
            distributed.broadcast_object_list(told, src=0, group=self._words)
        return told[0]

    def do(
        self,
        work: Callable[Concatenate[Learner, P], T],
        learner: Learner,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Rank 0: have all ranks call a function of a module on their learner; what it answers here."""
        return self.do_with({}, work, learner, *args, **kwargs)

    def do_with(
        self, here: Mapping[str, Any], work: Callable[..., T], learner: Learner, /, *args: Any, **kwargs: Any
    ) -> T:
        """`do` with further arguments that only rank 0 has a use for, such as a callback."""
        self._busy = True
        with _peers():
            self.tell((work, args, kwargs))
            answer = work(learner, *args, **kwargs, **here)
        self._busy = False
        return answer

    def follow(self, learner: Learner) -> None:
        """Other ranks: do what rank 0 does to its learner, until it dismisses them. Raises `PeerLost`."""
        while (told := self.hear()) is not None:
            work, args, kwargs = told
            with _peers():
                work(learner, *args, **kwargs)

    def dismiss(self) -> None:
        """Rank 0: there is nothing more to do. Where a work broke off here the others may be inside it and
        hear nothing: they end as their connections close."""
        if not self._busy:
            with suppress(RuntimeError):  # They have ended before, as when all fail alike.
                self.tell(None)


@contextmanager
def joined(config: RunConfig) -> Iterator[Team]:
    """The ranks that `torchrun` started, met; this process alone without it. Raises `ConfigError`."""
    if configuration.world_size() == 1:
        yield Team(None)
        return
    here = device(config)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if here.type == "cuda" else "gloo")
    try:
        team = Team(distributed.new_group(backend="gloo", timeout=SILENCE))
        if configuration.rank():
            yield team
            return
        try:
            yield team
        finally:
            team.dismiss()
    finally:
        distributed.destroy_process_group()


# ---------------------------------------------------------------------------- what is done to a learner


def published(learner: Learner, /, *args: Any, **kwargs: Any) -> PolicyVersion:
    """`publish.publish` of the policy."""
    return publish.publish(learner.policy, *args, **kwargs)


def saved(learner: Learner, /, root: Any, **kwargs: Any) -> None:
    """`checkpoint.save`."""
    checkpoint.save(root, learner, **kwargs)


def resumed(learner: Learner, /, root: Any) -> Resumed | None:
    """`checkpoint.load`, of what was then published: see `publish.require_same`."""
    found = checkpoint.load(root, learner)
    if found is not None and found.published is not None:
        publish.require_same(learner.policy, found.published)
    return found


def compared_with(learner: Learner, /, version: PolicyVersion) -> None:
    """Make a version the reference of KL terms, where the learner has one that is a model of its own."""
    if learner.reference is not None:
        fresh = publish.load_published(version)
        learner.reference.model.load_state_dict(fresh.state_dict())
