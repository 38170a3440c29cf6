"""The in-process policy server: any number of tasks, one worker thread, one model, exact log-probs.

`LocalSampler.sample` turns the ids of a prompt into sampled ids, the float32 log-prob of each under the
distribution that was sampled, and the policy version of each.

Invariants (the work is done by `agentrl.inference.engine`)
- A log-prob equals that of one plain forward over the same ids up to float32 rounding (tested below 2e-5),
  whatever else was in the batch and whatever was reused.
- Weights change only between steps, abort nothing, and a later token is a sample of the new policy given the
  whole prefix. A failed change leaves the old weights, the old version and a running engine.
- One request can fail (its ids, its length, its deadline) without touching another.

It does not tokenize, does not stream, and reads no files. The sampler owns its model object: nobody else may
run or change it except through `update_weights` and `publish`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from agentrl.errors import ModelError
from agentrl.inference.engine import Engine, EngineCounts, Row
from agentrl.inference.resume import sample_whole
from agentrl.inference.sampler import SampleRequest, SampleResult
from agentrl.inference.states import EngineState, refused

CLOSE_S = 30.0
"""How long `close` waits for the worker: one step, or one weight update."""
IDLE_CHECK_S = 1.0
"""How often an idle worker looks around without being woken."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    """Something to do between two steps, on the worker thread."""

    run: Callable[[], None]
    future: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop
    drain: bool
    """Wait until no row is in flight; nobody new starts meanwhile."""
    urgent: bool
    """Go before those that wait (pause and resume, which they may be waiting for)."""


class LocalSampler:
    """Samples from `model` in this process. See the module for what holds.

    Args:
        model: any transformers causal LM with full attention. It is switched to evaluation mode and to slot
            attention (which other callers see as `sdpa`).
        stop_token_ids: ids that end a generation, beside those of a request.
        name: what `SampleResult.model` says.
        version: policy version of the present weights; None for a policy without versions.
        max_slots: rows decoded together; more requests wait.
        max_context: prompt plus generation of one row; default the model's `max_position_embeddings`.
        idle_slots: finished sequences kept for prefix reuse beside the active rows; default `max_slots`, or
            as many as half the memory holds.
        seed: of the engine's own randomness; a request with a seed has its own.

    Raises:
        ConfigError: the model's attention is not one that slots can hold.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        stop_token_ids: tuple[int, ...],
        name: str,
        version: int | None = 0,
        max_slots: int = 64,
        max_context: int | None = None,
        idle_slots: int | None = None,
        seed: int | None = None,
    ) -> None:
        self._engine = Engine(
            model,
            stop_token_ids=stop_token_ids,
            name=name,
            version=version,
            max_slots=max_slots,
            idle_slots=idle_slots,
            max_context=max_context,
            seed=seed,
        )
        self._lock = threading.Condition()
        self._new_rows: list[Row] = []
        self._new_jobs: list[_Job] = []
        self._cancelled = False
        self._closing = False
        self._jobs: deque[_Job] = deque()
        self._thread = threading.Thread(target=self._work, name=f"sampler-{name}", daemon=True)
        self._thread.start()

    @property
    def model(self) -> str:
        return self._engine.name

    @property
    def policy_version(self) -> int | None:
        return self._engine.version

    @property
    def max_context(self) -> int:
        return self._engine.max_context

    @property
    def state(self) -> EngineState:
        return self._engine.state

    @property
    def counts(self) -> EngineCounts:
        return self._engine.counts

    @property
    def active(self) -> int:
        """Requests that are waiting or in flight right now."""
        return self._engine.in_flight + self._engine.waiting + len(self._new_rows)

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample one generation. Cancelling the awaiting task frees the row at the next step boundary; one
        that `abort` ended goes on from the tokens it has.

        Raises:
            ModelError: `context` (the prompt leaves no room), `token_id` (an id outside the vocabulary),
                `empty_prompt`, `deadline`, `nonfinite` (the logits were not numbers), `closed`, `engine`.
        """
        return await sample_whole(self._leg, request, context=self.max_context)

    async def _leg(self, request: SampleRequest) -> SampleResult:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[SampleResult] = loop.create_future()
        row = self._engine.row(request, lambda outcome: _settle(loop, future, outcome))
        with self._lock:
            self._refuse_closed()
            self._new_rows.append(row)
            self._lock.notify()
        try:
            async with asyncio.timeout(request.deadline_s):
                return await future
        except TimeoutError as error:
            raise ModelError(
                f"waiting for {self.model} since {request.deadline_s:.1f} s: {row.generated} tokens so far,"
                f" {self.active} requests, engine {self.state}.",
                fix="Raise the deadline, lower max_tokens, or look for a weight update that does not end.",
                code="deadline",
                phase="sample",
            ) from error
        finally:
            if not future.done() or future.cancelled():
                with self._lock:
                    row.cancelled = self._cancelled = True
                    self._lock.notify()

    async def update_weights(
        self, change: Callable[[], None], version: int, *, drain: bool = False, deadline_s: float = 600.0
    ) -> None:
        """Run `change` (an in-place copy into the model's parameters) between two steps and stamp what
        follows.

        Rows in flight go on under the new weights with their keys and values recomputed; with `drain` they
        finish first and nobody new starts. If `change` raises, or leaves a parameter non-finite, the
        parameters are put back, the version stays, generation goes on, and the error is the caller's.
        Afterwards the engine is in the state it was in (running, or paused).

        Raises:
            ModelError: `version` (not above the present one), `update` (not finite), `deadline`, `closed`.
            Whatever `change` raises.
        """
        await self._do(
            lambda: self._engine.update(change, version),
            what=f"update to version {version}",
            deadline_s=deadline_s,
            drain=drain,
        )

    async def publish(
        self,
        state: Mapping[str, torch.Tensor],
        version: int,
        *,
        drain: bool = False,
        deadline_s: float = 600.0,
    ) -> None:
        """`update_weights` from a state dict: copied by name. The tensors must not change until this returns.

        Raises:
            ModelError: `update` when a parameter is missing or has another shape; and as `update_weights`.
        """

        def change() -> None:
            done: set[int] = set()
            for name, parameter in self._engine.parameters().items():
                if name in state and state[name].shape == parameter.shape:
                    parameter.copy_(state[name])
                    done.add(id(parameter))
            missing = [n for n, p in self._engine.parameters().items() if id(p) not in done]
            if missing:
                raise ModelError(
                    f"version {version} does not hold {missing[0]} in the shape of the model"
                    f" ({len(missing)} such names).",
                    fix="Publish the state dict of the same architecture.",
                    code="update",
                    phase="update",
                    retryable=False,
                )

        await self.update_weights(change, version, drain=drain, deadline_s=deadline_s)

    async def abort(self, *, deadline_s: float = 60.0) -> None:
        """End what is in flight at the next step boundary. `sample` takes it up again with the tokens it
        has, so callers notice nothing; slots are free in between."""
        await self._do(self._engine.abort_all, what="abort", deadline_s=deadline_s, urgent=True)

    async def pause(self, *, deadline_s: float = 60.0) -> None:
        """Stop computing at the next step boundary; rows keep their place. Refused unless running."""
        await self._do(self._engine.pause, what="pause", deadline_s=deadline_s, urgent=True)

    async def resume(self, *, deadline_s: float = 60.0) -> None:
        """Go on. Refused unless paused."""
        await self._do(self._engine.resume, what="resume", deadline_s=deadline_s, urgent=True)

    async def close(self) -> None:
        """End the worker; whatever is waiting or in flight fails with `closed`. Idempotent."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            raise ModelError(
                f"waiting for the worker of {self.model} since {CLOSE_S:.0f} s: a step does not end.",
                fix="End the process.",
                code="deadline",
                phase="close",
            )

    async def _do(
        self,
        run: Callable[[], None],
        *,
        what: str,
        deadline_s: float,
        drain: bool = False,
        urgent: bool = False,
    ) -> None:
        loop = asyncio.get_running_loop()
        job = _Job(run=run, future=loop.create_future(), loop=loop, drain=drain, urgent=urgent)
        with self._lock:
            self._refuse_closed()
            self._new_jobs.append(job)
            self._lock.notify()
        try:
            async with asyncio.timeout(deadline_s):
                await job.future
        except TimeoutError as error:
            raise ModelError(
                f"waiting for {what} of {self.model} since {deadline_s:.1f} s: engine {self.state},"
                f" {self.active} requests.",
                fix="Raise the deadline, or find the step that does not end.",
                code="deadline",
                phase="update",
            ) from error

    def _refuse_closed(self) -> None:
        if self._closing:
            raise refused("closed", f"{self.model} is closed.", "Start a new sampler.")

    # -------------------------------------------------------------------------------------- the worker thread

    def _work(self) -> None:
        error = refused("closed", f"{self.model} was closed.", "Start a new sampler.")
        try:
            while self._take():
                self._engine.drop_cancelled()
                self._run_jobs()
                if self._engine.state is EngineState.RUNNING:
                    self._engine.step(admit=not self._jobs)
        except Exception as caught:  # the boundary: our own bug must not leave anybody waiting
            log.exception("the engine of %s ended", self.model)
            error = refused("engine", f"the engine of {self.model} ended: {caught!r}", "Report this.")
        with self._lock:
            self._closing = True
            for row in self._new_rows:
                self._engine.submit(row)
            self._jobs.extend(self._new_jobs)
            self._new_rows.clear()
            self._new_jobs.clear()
        self._engine.end(error)
        for job in self._jobs:
            _settle(job.loop, job.future, error)

    def _take(self) -> bool:
        """Wait for something to do and take what is new; False when it is over."""
        with self._lock:
            while not (
                self._new_rows or self._new_jobs or self._cancelled or self._closing or self._can_go_on()
            ):
                self._lock.wait(timeout=IDLE_CHECK_S)
            if self._closing:
                return False
            for row in self._new_rows:
                self._engine.submit(row)
            for job in self._new_jobs:
                (self._jobs.appendleft if job.urgent else self._jobs.append)(job)
            self._new_rows.clear()
            self._new_jobs.clear()
            self._cancelled = False
            return True

    def _can_go_on(self) -> bool:
        engine = self._engine
        if engine.state is not EngineState.RUNNING:
            return bool(self._jobs) and not self._jobs[0].drain
        return bool(engine.in_flight or self._jobs or engine.waiting)

    def _run_jobs(self) -> None:
        """Jobs in order; one that drains waits, and with it all behind it, until no row is in flight."""
        while self._jobs:
            job = self._jobs[0]
            if job.drain and self._engine.in_flight and not job.future.cancelled():
                return
            self._jobs.popleft()
            if job.future.cancelled():
                continue
            error: Exception | None = None
            try:
                job.run()
            except Exception as caught:  # the boundary: it belongs to whoever asked
                error = caught
            _settle(job.loop, job.future, error)


def _settle(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], outcome: object) -> None:
    """Hand an outcome to the task that waits, on its own loop. A loop that is gone has nobody waiting."""

    def settle() -> None:
        if future.done():
            return
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
