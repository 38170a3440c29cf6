"""The loop: tasks to trajectories to updates to published versions, in one process.

Synchronous training is the special case `rollout.max_lag = 0` of one rule: of groups that no update has
taken, at most those of this update and of `max_lag` more are begun, so that nothing is ever sampled more than
`max_lag` versions behind what it will be trained on. A recipe with dynamic sampling makes an update larger,
round by round, until enough of its groups have a spread. Sampling, sandboxes and the learner share the
process; updates run in a thread.

An update becomes real in this order: weights published (a folder, whole or absent), checkpoint (whole or
absent, with what it consumed), store (one transaction). A process killed anywhere between resumes without
losing a finished group or training one twice: what the checkpoint knows and the store does not is recorded
again, what was published and not checkpointed is retracted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from agentrl import config as configuration
from agentrl.algo import recipes, refusals
from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.inference.local import LocalSampler
from agentrl.inference.openai import ChatEndpoint
from agentrl.inference.sampler import Sampler
from agentrl.learner import model as models
from agentrl.learner import publish
from agentrl.learner.imitation import ImitationProgress
from agentrl.learner.step import Learner
from agentrl.store.store import Store
from agentrl.training import given, places, ranks, sampling, serving, view
from agentrl.training.curves import Curves
from agentrl.training.events import Listener, Noting
from agentrl.training.folder import RunFolder
from agentrl.training.report import write_report
from agentrl.training.sampling import Tally, Workplace
from agentrl.types import Group, PolicyVersion, Task, Trajectory, from_dict, to_dict
from envs.evidence import Admission
from envs.preparation import ImageStatus, images_of, require_all
from envs.sandbox.contract import Backend
from harness import group as groups
from harness.chat import ChatFormat
from harness.demonstrator import Habits
from harness.group import GroupOutcome, GroupRequest

ADMISSIONS_AT_ONCE = 4
KEEP_VERSION_0 = 2**31
"""Only version 0 is a multiple of it: the reference of KL terms and the `before` of every report stays."""


class Interrupted(AgentRLError):
    """The run was stopped from outside; everything finished is kept."""

    exit_code = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a finished run amounts to."""

    run_id: str
    algo: str
    seed: int
    heldout_n: int
    heldout_before: float | None
    heldout_after: float | None
    trajectories: int
    faults: int
    calls: int
    calls_checked: int
    wall_s: float
    report: str | None
    store: str
    folder: str


@dataclass(slots=True)
class _Progress:
    """Where training stands: what the checkpoint's cursor holds."""

    updates: int = 0
    version: PolicyVersion | None = None


def run(config: RunConfig, *, listener: Listener, resume: bool = False) -> RunSummary:
    """Do a whole run, or go on with one.

    Raises:
        ConfigError: the configuration is impossible, or the folder holds something else; before anything
        starts.
        SandboxError: the kernel refuses the isolation that is asked for.
        Interrupted: Ctrl-C; sandboxes are gone, finished groups and updates are kept.
    """
    started = time.monotonic()
    with ranks.joined(config) as team:
        summary = _run(config, team, listener, resume=resume)
    return replace(summary, wall_s=round(time.monotonic() - started, 1))


def _run(config: RunConfig, team: ranks.Team, listener: Listener, *, resume: bool) -> RunSummary:
    """What rank 0 of a run does."""
    recipe = recipes.compose(config.train.overrides, base=config.train.recipe)
    folder = RunFolder(config.run.folder)
    known = folder.check(config, resume=resume)
    refusals.check(recipe, _facts(config, recipe))
    with folder.held(), Store.open(config.run.store_url) as store:
        if known is None:
            row = store.begin_run(
                config.run.name, config=config.model_dump(mode="json"), algo=recipe.name, seed=config.run.seed
            )
            known = row.id
            folder.begin(known, config)
        else:
            listener.note(f"Resuming run {known} in {folder.root}.")
        try:
            with asyncio.Runner() as runner:
                return runner.run(_Run(config, recipe, folder, store, known, listener, team).whole())
        except (KeyboardInterrupt, asyncio.CancelledError) as stop:
            store.note(known, "interrupted", "stopped from outside")
            raise Interrupted(
                f"Run {known} was stopped; what it finished is kept in {folder.root}.",
                fix="Go on with the same command and --resume.",
            ) from stop


def follow(config: RunConfig) -> None:
    """Be one of the further processes of a run that `torchrun` started several of: returns when rank 0 is
    through. They see the run's folder under the same path. Raises as `run` does."""
    with ranks.joined(config) as team:
        told = team.hear()
        if told is None:  # Rank 0 did not come to have a learner.
            return
        config = RunConfig.model_validate(told)
        recipe = recipes.compose(config.train.overrides, base=config.train.recipe)
        given.settle(config)
        tokenizer = given.tokenizer(config, RunFolder(config.run.folder), ())
        policy = given.policy(config, tokenizer)
        team.follow(given.learner(config, recipe, policy, tokenizer))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSummary:
    """Held-out success of one policy."""

    run_id: str
    policy: str
    version: int | None
    """Of a published version; None for a policy from elsewhere."""
    attempted: int
    graded: int
    success: float | None
    """Share of graded attempts that earned the whole reward."""
    faults: int
    wall_s: float
    store: str


def evaluate(config: RunConfig, *, checkpoint: str | None, listener: Listener) -> EvalSummary:
    """Attempt the held-out tasks of a run file once each with one policy; stored as a run of its own.

    Args:
        config: tasks, sandbox and sampling; `eval.tasks` bounds how many (0: all that are held out).
        checkpoint: a version number of the run's folder, a folder or a hub id; None: the newest version of
        the run,
            or `policy.source` when it has none.

    Raises:
        ConfigError: no such policy.
    """
    folder = RunFolder(config.run.folder)
    started = time.monotonic()
    if not config.eval.tasks:
        config = config.model_copy(
            update={"eval": config.eval.model_copy(update={"tasks": config.tasks.heldout})}
        )
    version: PolicyVersion | None = None
    if config.eval.endpoint:
        if checkpoint is not None or not config.eval.model:
            raise ConfigError(
                "eval.endpoint needs eval.model and no checkpoint.", fix="Example: --set eval.model=NAME"
            )
        source = f"{config.eval.endpoint} {config.eval.model}"
    else:
        source, version = _policy_to_evaluate(config, folder, checkpoint)
    folder.root.mkdir(parents=True, exist_ok=True)
    with Store.open(config.run.store_url) as store:
        row = store.begin_run(
            f"{config.run.name}-eval",
            config=config.model_dump(mode="json"),
            algo="eval",
            seed=config.run.seed,
        )
        with asyncio.Runner() as runner:
            try:
                found = runner.run(_attempt_heldout(config, folder, store, row.id, listener, source, version))
            except (KeyboardInterrupt, asyncio.CancelledError) as stop:
                store.finish_run(row.id, "cancelled")
                raise Interrupted("The evaluation was stopped.", fix="Start it again.") from stop
        store.finish_run(row.id)
        tally = Tally.of(found)
        return EvalSummary(
            run_id=row.id,
            policy=source,
            version=None if version is None else version.number,
            attempted=tally.attempts,
            graded=tally.graded,
            success=tally.success,
            faults=tally.faults,
            wall_s=round(time.monotonic() - started, 1),
            store=store.url,
        )


def _policy_to_evaluate(
    config: RunConfig, folder: RunFolder, checkpoint: str | None
) -> tuple[str, PolicyVersion | None]:
    found = publish.versions(folder.versions)
    if checkpoint is None and found:
        return found[-1].location, found[-1]
    if checkpoint is not None and checkpoint.isdigit():
        for version in found:
            if version.number == int(checkpoint):
                return version.location, version
        raise ConfigError(
            f"{folder.root} has no published version {checkpoint}.",
            fix=f"It has: {', '.join(str(v.number) for v in found) or 'none'}.",
        )
    source = checkpoint or config.policy.source
    if source == "small":
        raise ConfigError(
            f"{folder.root} has no published version yet.", fix="Train first, or give --checkpoint."
        )
    return source, None


async def _attempt_heldout(
    config: RunConfig,
    folder: RunFolder,
    store: Store,
    run_id: str,
    listener: Listener,
    source: str,
    version: PolicyVersion | None,
) -> list[Trajectory]:
    one = _Run(config, None, folder, store, run_id, listener)
    suite = await asyncio.to_thread(given.tasks, config, folder)
    async with one.sandboxes(suite) as backend:
        if config.eval.endpoint:
            tokenizer = given.tokenizer(config, folder, suite.train)
            endpoint = ChatEndpoint(
                config.eval.endpoint, model=config.eval.model, key=configuration.environment("ENDPOINT_KEY")
            )
            try:
                place, tasks = await one.workplace(suite, backend, tokenizer, None)
                make = sampling.frozen_by(place, endpoint, temperature=config.eval.temperature)
                return await one.attempt_once(place, make, tasks.heldout, phase="heldout", kind="e")
            finally:
                await endpoint.close()
        tokenizer = given.loaded_tokenizer(source)
        here = ranks.device(config)
        model = (
            models.load(source, device=here)
            if version is None
            else publish.load_published(version, device=here)
        )
        given.settle(config)
        place, tasks = await one.workplace(suite, backend, tokenizer, _context(model))
        served: serving.Served
        if config.policy.server.urls:
            served = await serving.OnServers.connect(place, temperature=config.eval.temperature)
        else:
            sampler = LocalSampler(
                model,
                stop_token_ids=place.chat.stop_token_ids,
                name=source,
                version=None if version is None else version.number,
                max_slots=config.sandbox.concurrency,
                max_context=place.max_context,
                seed=config.run.seed,
            )
            served = serving.InProcess(sampler)
        try:
            if version is not None and config.policy.server.urls:
                await served.follow(version)
            place = replace(place, max_context=served.max_context)
            make = sampling.attempts_by(place, served.sampler, temperature=config.eval.temperature)
            return await one.attempt_once(place, make, tasks.heldout, phase="heldout", kind="e")
        finally:
            await served.close()


def _facts(config: RunConfig, recipe: recipes.Recipe) -> refusals.RunFacts:
    return refusals.RunFacts(
        group_size=config.rollout.group_size,
        has_critic=recipe.needs_critic,
        has_reference=recipe.needs_reference,
        has_teacher=bool(config.teacher.source),
        columns=recipes.RUN_COLUMNS,
        temperature=config.rollout.temperature,
        max_lag=config.rollout.max_lag,
        updates_per_batch=config.train.epochs * config.train.mini_batches,
        shared_critic=config.train.critic == "shared",
        critic_warmup=config.train.critic_warmup_updates,
        adapter_rank=config.train.lora.rank,
        random_policy=config.policy.source == "small",
    )


class _Run:
    """One run while it goes on."""

    def __init__(
        self,
        config: RunConfig,
        recipe: recipes.Recipe | None,
        folder: RunFolder,
        store: Store,
        run_id: str,
        listener: Listener,
        team: ranks.Team | None = None,
    ) -> None:
        """`recipe` and `team` are None for a run that only evaluates."""
        self.config = config
        self.recipe = recipe
        self.folder = folder
        self.store = store
        self.run_id = run_id
        self.listener = Noting(listener, store, run_id)
        self.progress = _Progress()
        self._team = team or ranks.Team(None)

    async def whole(self) -> RunSummary:
        config, folder = self.config, self.folder
        assert self.recipe is not None
        given.settle(config)
        suite = await asyncio.to_thread(given.tasks, config, folder)
        async with self.sandboxes(suite) as backend:  # first: no weights are loaded for what can not be had
            tokenizer = await asyncio.to_thread(given.tokenizer, config, folder, suite.demonstrated)
            model = await asyncio.to_thread(given.policy, config, tokenizer)
            place, tasks = await self.workplace(suite, backend, tokenizer, _context(model))
            self._team.tell(config)
            learner = await asyncio.to_thread(given.learner, config, self.recipe, model, tokenizer)
            await self._recover(place, learner, tokenizer, tasks.demonstrated)
            assert self.progress.version is not None
            seed = config.run.seed + 1000 * self.progress.updates
            served = await serving.serve(place, self.progress.version, seed=seed)
            try:
                place = replace(place, max_context=served.max_context)
                before = await self._evaluate(place, served.sampler, tasks.heldout, phase="heldout_before")
                await self._train(place, learner, served, tokenizer, tasks)
                after = await self._evaluate(place, served.sampler, tasks.heldout, phase="heldout_after")
            finally:
                await served.close()
        return await asyncio.to_thread(self._finish, place, before, after)

    @asynccontextmanager
    async def sandboxes(self, tasks: given.Tasks) -> AsyncIterator[Backend]:
        """A checked backend that has the images of these tasks; everything is given back at the end."""
        backend = given.backend(self.config, self.folder.root / "sandboxes", self.listener)
        try:
            if self.config.sandbox.prepare:
                trained = () if self.recipe is None else (*tasks.train, *tasks.demonstrated)
                await self._prepare([*trained, *tasks.heldout], backend)
            yield backend
        finally:
            await backend.close()

    async def workplace(
        self, tasks: given.Tasks, backend: Backend, tokenizer: Any, context: int | None
    ) -> tuple[Workplace, given.Tasks]:
        """Where attempts are made, and the tasks that were admitted there."""
        admissions = await self._admit([*tasks.train, *tasks.heldout], backend)
        place = Workplace(
            config=self.config,
            run_id=self.run_id,
            store=self.store,
            listener=self.listener,
            backend=backend,
            chat=ChatFormat(tokenizer, tool_parser=self.config.policy.tool_parser),
            admissions=admissions,
            signing_key=self.folder.signing_key(),
            max_context=context,
        )
        admitted = given.Tasks(
            train=tuple(t for t in tasks.train if admissions[t.id].valid),
            heldout=tuple(t for t in tasks.heldout if admissions[t.id].valid),
            demonstrated=tasks.demonstrated,
        )
        return place, admitted

    # ------------------------------------------------------------------------------------------ preparation

    async def _prepare(self, tasks: Sequence[Task], backend: Backend) -> None:
        """Images of all tasks. Raises `SandboxError` with the list of those that can not be had."""
        total = len(images_of(tasks))
        if not total:
            return
        self.listener.begin("images", total=total, unit="images")
        failed = 0

        def heard(status: ImageStatus) -> None:
            nonlocal failed
            failed += status.state == "failed"
            self.listener.advance(1, failed=failed)

        statuses = await places.prepare(tasks, backend, heard=heard)
        self.listener.end(failed=failed)
        require_all(statuses)

    async def _admit(self, tasks: Sequence[Task], backend: Backend) -> dict[str, Admission]:
        """Admissions of all tasks: from the store where this revision was validated in the last month, else
        made now."""
        mode = self.config.tasks.admission
        limit = asyncio.Semaphore(ADMISSIONS_AT_ONCE)
        self.listener.begin("tasks", total=len(tasks), unit="tasks")
        quarantined = old = 0

        async def one(task: Task) -> Admission:
            nonlocal quarantined, old
            row = await asyncio.to_thread(self.store.admission, task.id, task.revision)
            stored: Admission | None = None
            if row is not None and row.facts.get("backend") == backend.name:
                stored = Admission(**row.facts)
            aged = stored is not None and stored.old(time.time())
            if stored is not None and (mode == "stored" or not aged):
                admission = stored
                old += aged
            elif mode == "stored":
                raise ConfigError(
                    f"Task {task.id} was never validated.",
                    fix="Run agentrl tasks validate, or set tasks.admission.",
                )
            else:
                async with limit:
                    admission = await places.admit(task, backend, light=mode == "light")
                await asyncio.to_thread(self._keep_admission, task, admission)
            if not admission.valid:
                quarantined += 1
                self.listener.note(f"Task {task.id} is quarantined: {'; '.join(admission.reasons)}")
            self.listener.advance(1, quarantined=quarantined)
            return admission

        try:
            async with asyncio.TaskGroup() as all_of_them:
                made = [all_of_them.create_task(one(task)) for task in tasks]
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from several
        self.listener.end(quarantined=quarantined)
        if old:
            self.listener.note(
                f"{old} tasks were validated more than a month ago, and what passed then may depend on a"
                " date: run agentrl tasks validate --store again, or set tasks.admission to light."
            )
        return {task.id: each.result() for task, each in zip(tasks, made, strict=True)}

    def _keep_admission(self, task: Task, admission: Admission) -> None:
        self.store.add_task(task)
        self.store.add_admission(task.id, task.revision, valid=admission.valid, facts=to_dict(admission))

    async def _recover(
        self, place: Workplace, learner: Learner, tokenizer: Any, shown: Sequence[Task]
    ) -> None:
        """The last good state of this run: from its checkpoint, or version 0 after the cold start on what is
        shown."""
        team = self._team
        resumed = await asyncio.to_thread(team.do, ranks.resumed, learner, self.folder.checkpoints)
        if resumed is None:
            for number in publish.retract_after(self.folder.versions, -1):
                self.listener.note(f"Version {number} was published without a checkpoint; it is made again.")
            await self._cold_start(place, learner, shown)
            self.progress.version = await asyncio.to_thread(
                team.do_with,
                {"tokenizer": tokenizer},
                ranks.published,
                learner,
                self.folder.versions,
                parent=None,
                step=0,
            )
            await asyncio.to_thread(self._checkpoint, learner, None)
            self._replay(None)
            await self._compare(learner)
            return
        for notice in resumed.notices:
            self.listener.note(notice)
        self.progress.updates = resumed.cursor["updates"]
        recorded = max((u.step for u in self.store.updates(self.run_id)), default=0)
        if recorded > self.progress.updates:
            raise ConfigError(
                f"The last readable checkpoint is of update {self.progress.updates}, and the store knows of"
                f" update {recorded}: what that one moved is lost, and what it took is trained.",
                fix=f"Restore {self.folder.checkpoints} from a copy, or begin another run with policy.source"
                " set to the newest version that is there.",
            )
        self.progress.version = resumed.published
        assert resumed.published is not None, "every checkpoint of a run follows a publication"
        publish.retract_after(self.folder.versions, resumed.published.number)
        self._replay(resumed.cursor["last"])
        await self._compare(learner)
        self.listener.note(
            f"Going on after update {self.progress.updates} with version {resumed.published.number}."
        )

    async def _compare(self, learner: Learner) -> None:
        """Version 0 is what KL terms compare with."""
        first = publish.versions(self.folder.versions)[0]
        await asyncio.to_thread(self._team.do, ranks.compared_with, learner, first)

    def _checkpoint(self, learner: Learner, last: Mapping[str, Any] | None) -> None:
        self._team.do(
            ranks.saved,
            learner,
            self.folder.checkpoints,
            cursor={"updates": self.progress.updates, "last": last},
            published=self.progress.version,
            keep=self.config.keep.checkpoints,
        )

    def _replay(self, last: Mapping[str, Any] | None) -> None:
        """Make the store know what the checkpoint knows; a no-op when it does."""
        if last is None:
            assert self.progress.version is not None
            if self.store.latest_version(self.run_id) is None:
                self.store.publish(self.run_id, self.progress.version)
            return
        version = None if last["version"] is None else from_dict(PolicyVersion, last["version"])
        self.store.record_update(self.run_id, last["update"], last["ids"], version, last["metrics"])

    async def _cold_start(self, place: Workplace, learner: Learner, shown: Sequence[Task]) -> None:
        """Imitate the demonstrator's recorded trajectories."""
        wanted = self.config.coldstart
        if not wanted.demonstrations:
            return
        habits = Habits(careful=wanted.careful, give_up=wanted.give_up, change_mind=wanted.change_mind)
        requests = sampling.requests_for(
            place, shown, count=wanted.demonstrations, size=1, kind="d", seed=self.config.run.seed
        )
        make = sampling.demonstrations_by(place, habits)
        examples = await sampling.collect(place, requests, make, phase="demonstration")
        examples.sort(key=lambda t: t.id)  # not as they happened to finish: a seed means one cold start
        here = asyncio.get_running_loop()
        steps = wanted.epochs * -(-len(examples) // wanted.batch)
        self.listener.begin("imitation", total=steps, unit="steps")

        def tell(at: ImitationProgress) -> None:
            facts = {"loss": round(at.loss, 4), "accuracy": round(at.accuracy, 4)}
            here.call_soon_threadsafe(lambda: self.listener.advance(1, **facts))

        def imitate() -> list[float]:
            usual = torch.get_num_threads()
            torch.set_num_threads(wanted.threads or usual)
            try:
                return self._team.do_with(
                    {"progress": tell},
                    Learner.imitate,
                    learner,
                    examples,
                    epochs=wanted.epochs,
                    mini_batch=wanted.batch,
                    learning_rate=wanted.learning_rate,
                    schedule="cosine",
                    warmup_steps=steps // 8,
                )
            finally:
                torch.set_num_threads(usual)

        losses = await asyncio.to_thread(imitate)
        self.store.log(self.run_id, [(i, "imitation/loss", x) for i, x in enumerate(losses)])
        self.listener.end(loss=round(losses[-1], 4))

    # ------------------------------------------------------------------------------------------- evaluation

    async def _evaluate(
        self, place: Workplace, sampler: Sampler, heldout: Sequence[Task], *, phase: str
    ) -> float | None:
        """Success on the held-out tasks, one attempt each; None without tasks."""
        if not heldout:
            return None
        kind = {"heldout_before": "hb", "heldout_after": "ha"}.get(phase, f"h{phase.rpartition('_')[2]}-")
        make = sampling.attempts_by(place, sampler, temperature=self.config.eval.temperature)
        found = await self.attempt_once(place, make, heldout, phase=phase, kind=kind)
        success = Tally.of(found).success
        if success is not None:
            self.store.log(self.run_id, [(self.progress.updates, "heldout/success", success)])
        return success

    async def attempt_once(
        self, place: Workplace, make: groups.MakeAttempt, tasks: Sequence[Task], *, phase: str, kind: str
    ) -> list[Trajectory]:
        """One attempt at each task."""
        requests = [
            GroupRequest(id=f"{self.run_id}-{kind}{number:05d}", task=task, size=1)
            for number, task in enumerate(tasks)
        ]
        return await sampling.collect(place, requests, make, phase=phase, step=self.progress.updates)

    # --------------------------------------------------------------------------------------------- training

    async def _train(
        self,
        place: Workplace,
        learner: Learner,
        served: serving.Served,
        tokenizer: Any,
        tasks: given.Tasks,
    ) -> None:
        config = self.config
        recipe = learner.recipe
        per_update, total = config.rollout.groups, config.train.updates
        requests = sampling.requests_for(
            place,
            tasks.train,
            count=total * per_update * sampling.most_rounds(recipe),
            size=config.rollout.group_size,
            kind="g",
            seed=config.run.seed,
        )
        ready = self._stored(place)
        have = sampling.stored_groups(place, "train")
        waiting = [r for r in requests if r.id not in have]
        make = sampling.attempts_by(place, served.sampler, temperature=config.rollout.temperature)
        greedy = None
        if "greedy_reward_S" in recipe.columns:
            greedy = sampling.attempts_by(place, served.sampler, temperature=0.0)
        compared = sampling.stored_groups(place, sampling.GREEDY)
        limit = asyncio.Semaphore(config.sandbox.concurrency)
        running: set[asyncio.Task[GroupOutcome]] = set()

        async def attempt(request: GroupRequest) -> GroupOutcome:
            """A group; where the recipe compares with one, after the greedy attempt at its task."""
            beside = replace(request, id=sampling.greedy_of(request.id), size=1)
            if greedy is not None and beside.id not in compared:
                baseline = await groups.run(beside, greedy, limit=limit)
                await sampling.keep(place, baseline, phase=sampling.GREEDY, step=self.progress.updates)
            return await groups.run(request, make, limit=limit)

        self.listener.begin(
            "train", total=total * per_update * config.rollout.group_size, unit="trajectories"
        )
        if have:
            self.listener.advance(len(have) * config.rollout.group_size)
        curves = Curves(self.folder.tensorboard)
        collecting = time.monotonic()
        try:
            while self.progress.updates < total:
                size, rounds = per_update, 1
                while True:
                    room = size + config.rollout.max_lag * per_update - len(ready) - len(running)
                    for request in waiting[: max(0, room)]:
                        running.add(asyncio.create_task(attempt(request)))
                    del waiting[: max(0, room)]
                    while len(ready) < size:
                        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                        for finished in done:
                            outcome = finished.result()
                            await sampling.keep(place, outcome, phase="train", step=self.progress.updates)
                            ready.append(outcome.group)
                            self.listener.advance(len(outcome.group.trajectories), **_facts_of(outcome.group))
                    do, usable = sampling.next_round(recipe, ready[:size], wanted=per_update, rounds=rounds)
                    if do != "sample":
                        break
                    size, rounds = size + per_update - usable, rounds + 1
                batch, ready = ready[:size], ready[size:]
                facts = {
                    "time/collect_s": time.monotonic() - collecting,
                    "sampling/rounds": float(rounds),
                    "sampling/usable_groups": float(usable),
                }
                values = await self._update(
                    place, learner, served, tokenizer, batch, facts, skip=do == "skip"
                )
                collecting = time.monotonic()
                curves.add(self.progress.updates, values)
                self.listener.metrics(self.progress.updates, values)
                if config.eval.every and self.progress.updates % config.eval.every == 0:
                    await self._evaluate(
                        place, served.sampler, tasks.heldout, phase=f"heldout_{self.progress.updates}"
                    )
        finally:
            curves.close()
            for unfinished in running:
                unfinished.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*running, return_exceptions=True)
        self.listener.end()

    def _stored(self, place: Workplace) -> list[Group]:
        """Whole groups in the store that no update has consumed."""
        ids = dict.fromkeys(r.group_id for r in self.store.unconsumed(self.run_id, "train"))
        return [
            Group(id=g, task_id=members[0].task_id, trajectories=members)
            for g in ids
            if (members := tuple(self.store.iter_trajectories(self.run_id, phase="train", group=g)))
        ]

    async def _update(
        self,
        place: Workplace,
        learner: Learner,
        served: serving.Served,
        tokenizer: Any,
        batch: Sequence[Group],
        facts: dict[str, float],
        *,
        skip: bool,
    ) -> dict[str, float]:
        """One update (`skip`: that trains nothing), published and recorded; the sampler follows. Returns its
        metrics."""
        progress, config = self.progress, self.config
        parent = progress.version
        assert parent is not None
        warming = progress.updates < config.train.critic_warmup_updates and learner.critic is not None
        began = time.monotonic()
        trained: Sequence[Group] = batch
        extra: Mapping[str, torch.Tensor] | None = None
        if "greedy_reward_S" in learner.recipe.columns:
            trained, extra = sampling.with_greedy(place, batch)
            facts["sampling/groups_without_greedy"] = float(len(batch) - len(trained))
        if skip or not trained:
            report = self._team.do(
                Learner.skip,
                learner,
                "too few groups have a spread after the last round of sampling"
                if skip
                else "no greedy attempt was graded",
            )
        else:
            report = await asyncio.to_thread(
                self._team.do,
                Learner.update,
                learner,
                trained,
                version=parent.number,
                extra=extra,
                train_policy=not warming,
            )
        facts["time/update_s"] = time.monotonic() - began
        for cause in dict.fromkeys(report.refused):
            self.listener.note(f"Update {progress.updates + 1} was refused: {cause}")
        if report.nothing is not None:
            self.listener.note(f"Update {progress.updates + 1} had nothing to train on: {report.nothing}")
        progress.updates += 1
        metrics = {
            **report.metrics,
            **sampling.behaviour(batch),
            **facts,
            "policy/version": float(parent.number),
        }
        moved = report.taken > 0 and not warming
        began = time.monotonic()
        await asyncio.to_thread(self._publish, learner, tokenizer, batch, metrics, moved=moved)
        if moved:
            assert progress.version is not None
            await served.follow(progress.version)
        published = {"time/publish_s": time.monotonic() - began}
        self.store.log(self.run_id, [(progress.updates, name, value) for name, value in published.items()])
        return metrics | published

    def _publish(
        self,
        learner: Learner,
        tokenizer: Any,
        batch: Sequence[Group],
        metrics: Mapping[str, float],
        *,
        moved: bool,
    ) -> None:
        progress = self.progress
        if moved:
            progress.version = self._team.do_with(
                {"tokenizer": tokenizer},
                ranks.published,
                learner,
                self.folder.versions,
                parent=progress.version,
                step=learner.optimizer_step,
                keep=publish.Keep(last=self.config.keep.versions, every=KEEP_VERSION_0),
            )
        last = {
            "update": progress.updates,
            "ids": [t.id for g in batch for t in g.trajectories],
            "version": to_dict(progress.version) if moved else None,
            "metrics": dict(metrics),
        }
        self._checkpoint(learner, last)
        self._replay(last)

    # ------------------------------------------------------------------------------------------------ report

    def _finish(self, place: Workplace, before: float | None, after: float | None) -> RunSummary:
        verified = self.store.verify(self.run_id, key=place.signing_key)
        if not verified.ok:
            self.listener.note(
                f"The evidence of this run does not verify: {verified.broken_id}: {verified.why}"
            )
        self.store.finish_run(self.run_id)
        self.listener.begin("report", total=1, unit="pages")
        path = write_report(self.store, self.run_id, self.folder.report)
        self.listener.advance(1)
        self.listener.end()
        rows = self.store.trajectories(self.run_id, limit=None)
        return RunSummary(
            run_id=self.run_id,
            algo="" if self.recipe is None else self.recipe.name,
            seed=self.config.run.seed,
            heldout_n=sum(r.phase == "heldout_after" for r in rows),
            heldout_before=before,
            heldout_after=after,
            trajectories=len(rows),
            faults=sum(r.reward is None and r.fault_code != view.NOT_ADMITTED for r in rows),
            calls=sum(r.calls for r in rows),
            calls_checked=verified.calls_checked,
            wall_s=0.0,
            report=str(path),
            store=self.store.url,
            folder=str(self.folder.root),
        )


def _context(model: Any) -> int:
    return int(model.config.max_position_embeddings) - sampling.CONTEXT_MARGIN


def _facts_of(group: Group) -> dict[str, float | int | str]:
    rewards = [t.reward for t in group.trajectories if t.reward is not None]
    return {"reward": round(sum(rewards) / len(rewards), 3)} if rewards else {}
