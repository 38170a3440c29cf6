"""Trajectories for a run: attempts are made, stored as soon as their group is whole, and counted.

What is stored under a group id is never made again, so a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from agentrl.algo import select
from agentrl.algo.axes import Number, numbers_of
from agentrl.algo.recipes import Recipe
from agentrl.algo.select import SELECT, SPREAD_TOLERANCE
from agentrl.config import RunConfig
from agentrl.inference.openai import ChatEndpoint
from agentrl.inference.sampler import Sampler
from agentrl.inference.scripted import Script, ScriptedSampler
from agentrl.store.store import Store
from agentrl.training import places, view
from agentrl.training.events import Listener
from agentrl.types import Group, SamplingParams, Task, Trajectory
from envs import registry
from envs.evidence import Admission
from envs.sandbox.contract import Backend
from harness import context as contexts
from harness import group as groups
from harness.agent import Agent, ToolAgent
from harness.agents import catalogue
from harness.agents.command import CommandAgent
from harness.chat import ChatFormat
from harness.demonstrator import Demonstrator, Habits
from harness.frozen import FrozenPolicy
from harness.gold import GoldDemonstrator
from harness.group import GroupOutcome, GroupRequest
from harness.rollout import RolloutSettings, run_one

GREEDY = "greedy"
"""Phase of the attempts that only serve as a baseline: no update ever takes them."""
CONTEXT_MARGIN = 8
"""Tokens of the model's context kept free, so that a full context is noticed before the engine refuses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """What every attempt of a run shares."""

    config: RunConfig
    run_id: str
    store: Store
    listener: Listener
    backend: Backend
    chat: ChatFormat
    admissions: Mapping[str, Admission]
    """By task id."""
    signing_key: bytes
    max_context: int | None

    def settings(self, temperature: float) -> RolloutSettings:
        """How attempts sample at a temperature."""
        return RolloutSettings(
            sampling=SamplingParams(temperature=temperature, max_tokens=self.config.rollout.max_tokens),
            max_context=self.max_context,
        )


def attempts_by(place: Workplace, sampler: Sampler, *, temperature: float) -> groups.MakeAttempt:
    """Attempts of the policy behind `sampler`."""
    settings = place.settings(temperature)
    rollout = place.config.rollout
    agent: Agent = ToolAgent(
        context=contexts.get(rollout.context, rollout.context_tokens or None), nudges=rollout.nudges
    )
    if rollout.agent != catalogue.BUILT_IN:
        folder = Path(rollout.agent_folder) if rollout.agent_folder else None
        agent = catalogue.get(rollout.agent, folder=folder)
    mounts = agent.mounts if isinstance(agent, CommandAgent) else ()

    async def make(task: Task, group_id: str, index: int, attempt: int) -> Trajectory:
        return await run_one(
            task,
            sampler=sampler,
            chat=place.chat,
            backend=place.backend,
            group_id=group_id,
            index=index,
            signing_key=place.signing_key,
            admission=place.admissions.get(task.id),
            agent=agent,
            settings=settings,
            attempt=attempt,
            open_session=places.open_session(place.backend, mounts=mounts),
        )

    return make


def frozen_by(place: Workplace, endpoint: ChatEndpoint, *, temperature: float) -> groups.MakeAttempt:
    """Attempts of a chat endpoint: graded like those of a policy, and never trained on."""
    settings = replace(place.settings(temperature), require_log_probs=False)

    async def make(task: Task, group_id: str, index: int, attempt: int) -> Trajectory:
        frozen = FrozenPolicy(endpoint, place.chat, nudges=place.config.rollout.nudges)
        return await run_one(
            task,
            sampler=frozen.sampler,
            chat=place.chat,
            backend=place.backend,
            group_id=group_id,
            index=index,
            signing_key=place.signing_key,
            admission=place.admissions.get(task.id),
            agent=frozen.agent,
            settings=settings,
            attempt=attempt,
            open_session=places.open_session(place.backend),
        )

    return make


def demonstrations_by(place: Workplace, habits: Habits) -> groups.MakeAttempt:
    """Attempts of the scripted demonstrator, each with its own draws."""
    settings = RolloutSettings(
        sampling=SamplingParams(max_tokens=place.config.rollout.max_tokens),
        max_context=place.max_context,
        require_log_probs=False,
    )

    async def make(task: Task, group_id: str, index: int, attempt: int) -> Trajectory:
        seed = draws_of(place.config.run.seed, place.run_id, group_id, index)
        environment = registry.of_task(task)
        script: Script
        if environment is not None:
            script = GoldDemonstrator(environment.problem(int(task.metadata["seed"])), seed=seed)
        else:
            script = Demonstrator(task, habits, place.chat, seed=seed)
        return await run_one(
            task,
            sampler=ScriptedSampler(script, encode=place.chat.encode_reply, name="demonstrator"),
            chat=place.chat,
            backend=place.backend,
            group_id=group_id,
            index=index,
            signing_key=place.signing_key,
            admission=place.admissions.get(task.id),
            settings=settings,
            attempt=attempt,
            open_session=places.open_session(place.backend),
            judge=task.id in place.admissions,
        )

    return make


async def keep(place: Workplace, outcome: GroupOutcome, *, phase: str, step: int | None) -> None:
    """Store a finished group and the faulted attempts beside it."""

    def write() -> None:
        for trajectory in outcome.faulted:
            place.store.add_trajectory(place.run_id, trajectory, phase=f"{phase}_faulted", step=step)
        place.store.add_group(place.run_id, outcome.group, phase=phase, step=step)

    await asyncio.to_thread(write)
    for trajectory in outcome.faulted:
        fault = trajectory.verdict.fault
        assert fault is not None
        place.listener.note(
            f"{trajectory.id}: {fault.owner} fault {fault.code} in {fault.phase}: {fault.message}"
        )


def stored_groups(place: Workplace, phase: str) -> set[str]:
    """Ids of the groups of a phase that are already in the store."""
    return {row.group_id for row in place.store.trajectories(place.run_id, phase=phase, limit=None)}


async def collect(
    place: Workplace,
    requests: Sequence[GroupRequest],
    make: groups.MakeAttempt,
    *,
    phase: str,
    step: int | None = None,
) -> list[Trajectory]:
    """Make what is not stored yet, all of it, with progress; the trajectories of all requests, stored or
    new."""
    have = stored_groups(place, phase)
    missing = [r for r in requests if r.id not in have]
    tally = Tally()
    place.listener.begin(phase, total=sum(r.size for r in requests), unit="trajectories")
    if len(missing) < len(requests):
        place.listener.advance(sum(r.size for r in requests if r.id in have))
    async with aclosing(_stream(place, missing, make)) as outcomes:
        async for outcome in outcomes:
            await keep(place, outcome, phase=phase, step=step)
            tally.add(outcome)
            place.listener.advance(len(outcome.group.trajectories), **tally.facts())
    wanted = {r.id for r in requests}
    found = [t for t in place.store.iter_trajectories(place.run_id, phase=phase) if t.group_id in wanted]
    place.listener.end(**Tally.of(found).facts())
    return found


def _stream(
    place: Workplace, requests: Iterable[GroupRequest], make: groups.MakeAttempt
) -> AsyncGenerator[GroupOutcome]:
    concurrency = place.config.sandbox.concurrency

    def announced() -> Iterator[GroupRequest]:
        for request in requests:
            places.expect(place.backend, request.id, min(request.size, concurrency))
            yield request

    return groups.run_many(announced(), make, concurrency=concurrency)


class Tally:
    """Running counts for progress lines. What was never to be graded is neither graded nor a fault."""

    def __init__(self) -> None:
        self.attempts = 0
        self.graded = 0
        self.solved = 0
        self.faults = 0

    @staticmethod
    def of(trajectories: Iterable[Trajectory]) -> Tally:
        tally = Tally()
        for trajectory in trajectories:
            tally._one(trajectory)
        return tally

    def add(self, outcome: GroupOutcome) -> None:
        self.faults += len(outcome.faulted)
        for trajectory in outcome.group.trajectories:
            self._one(trajectory)

    def _one(self, trajectory: Trajectory) -> None:
        self.attempts += 1
        if trajectory.reward is None:
            fault = trajectory.verdict.fault
            self.faults += fault is None or fault.code != view.NOT_ADMITTED
            return
        self.graded += 1
        self.solved += trajectory.reward >= 1.0

    @property
    def success(self) -> float | None:
        """Share of graded attempts that earned the whole reward; None when none was graded."""
        return self.solved / self.graded if self.graded else None

    def facts(self) -> dict[str, float | int | str]:
        facts: dict[str, float | int | str] = {"faults": self.faults}
        if self.success is not None:
            facts["success"] = round(self.success, 3)
        return facts


def behaviour(group_list: Sequence[Group]) -> dict[str, float]:
    """What the policy did, as metrics: rewards, turns, tokens, and whether tests are run before
    submitting."""
    members = [t for g in group_list for t in g.trajectories]
    graded = [t for t in members if t.reward is not None]
    numbers = {
        "rollout/trajectories": float(len(members)),
        "rollout/ungraded": float(len(members) - len(graded)),
        "rollout/turns_mean": _mean(len(t.turns) for t in members),
        "rollout/generated_tokens_mean": _mean(
            sum(len(c.generation_token_ids) for c in t.calls) for t in members
        ),
        "rollout/tests_run_share": _mean(float(ran_tests(t)) for t in members),
        "rollout/format_error_share": _mean(
            float(a.error is not None) for t in members for turn in t.turns for a in turn.actions
        ),
    }
    if graded:
        numbers["reward/mean"] = _mean(t.reward or 0.0 for t in graded)
        numbers["rollout/success"] = _mean(float((t.reward or 0.0) >= 1.0) for t in graded)
    for reason in {t.termination for t in members}:
        numbers[f"termination/{reason}"] = _mean(float(t.termination is reason) for t in members)
    return numbers


def next_round(
    recipe: Recipe, batch: Sequence[Group], *, wanted: int, rounds: int
) -> tuple[Literal["sample", "train", "skip"], int]:
    """What follows when a batch is there: dynamic sampling asks for more until enough groups have a spread,
    within its cap (`select.next_round`); any other recipe trains.

    Args:
        batch: groups of this update so far, of all rounds.
        wanted: groups with a spread that an update should have.
        rounds: how often was sampled for this update, from 1.

    Returns:
        what to do, and how many groups there are with a spread.
    """
    usable = sum(_spreads(group) for group in batch)
    numbers = _dynamic(recipe)
    if numbers is None:
        return "train", usable
    decided = select.next_round(
        usable=usable,
        wanted=wanted,
        rounds=rounds,
        max_rounds=int(str(numbers["max_rounds"])),
        at_cap=str(numbers["at_cap"]),
    )
    return decided, usable


def greedy_of(group_id: str) -> str:
    """Id of the group that holds the greedy attempt beside another group."""
    return f"{group_id}-greedy"


def with_greedy(place: Workplace, batch: Sequence[Group]) -> tuple[list[Group], Mapping[str, torch.Tensor]]:
    """The groups whose greedy attempt was graded, and what it earned as a column of their trajectories: a
    group without it has nothing to be compared with."""
    trained: list[Group] = []
    rewards: list[float] = []
    for group in batch:
        found = place.store.iter_trajectories(place.run_id, phase=GREEDY, group=greedy_of(group.id))
        earned = next((t.reward for t in found if t.reward is not None), None)
        if earned is not None:
            trained.append(group)
            rewards += [earned] * len(group.trajectories)
    return trained, {"greedy_reward_S": torch.tensor(rewards, dtype=torch.float64)}


def most_rounds(recipe: Recipe) -> int:
    """How often may be sampled for one update."""
    numbers = _dynamic(recipe)
    return 1 if numbers is None else int(str(numbers["max_rounds"]))


def _dynamic(recipe: Recipe) -> Mapping[str, Number] | None:
    """The numbers of a recipe's dynamic sampling; None: it has none."""
    chosen = next((c for c in recipe.select if c.operator == "mixed_groups"), None)
    return None if chosen is None else numbers_of(SELECT["mixed_groups"], chosen)


def _spreads(group: Group) -> bool:
    """Whether the rewards of its graded members differ."""
    rewards = [t.reward for t in group.trajectories if t.reward is not None and t.calls]
    return bool(rewards) and max(rewards) - min(rewards) > SPREAD_TOLERANCE


def ran_tests(trajectory: Trajectory) -> bool:
    """Whether the policy ran the tests at least once."""
    return any(action.tool == "run_tests" for turn in trajectory.turns for action in turn.actions)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def draws_of(seed: int, run_id: str, group_id: str, index: int) -> str:
    """What a scripted attempt draws from: the same in every run with this seed, whatever its id."""
    return f"{seed}/{group_id.removeprefix(run_id)}/{index}"


def requests_for(
    place: Workplace, tasks: Sequence[Task], *, count: int, size: int, kind: str, seed: int
) -> list[GroupRequest]:
    """`count` groups over the tasks in a shuffled order that repeats; ids are the same in every process."""
    rng = random.Random(f"{seed}/{kind}")
    order: list[Task] = []
    while len(order) < count:
        order += rng.sample(list(tasks), len(tasks))
    return [
        GroupRequest(id=f"{place.run_id}-{kind}{number:05d}", task=task, size=size)
        for number, task in enumerate(order[:count])
    ]
