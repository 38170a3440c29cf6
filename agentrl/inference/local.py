"""The in-process policy server: a transformers causal LM, one worker thread, continuous batching, exact
log-probs.

`LocalSampler.sample` turns the ids of a prompt into sampled ids, the float32 log-prob of each under the
distribution that was sampled, and the policy version of each. Requests join and leave at step boundaries; a
step costs about one bare forward of the active rows. The ids that are fed come from the engine's own token
buffer, and the echo in the result is read back from that buffer.

Invariants
- A log-prob equals that of one plain forward over the same ids, up to float32 rounding (tested below 2e-5),
  whatever else was in the batch and whatever was reused: keys and values are reused only for tokens that are
  an exact prefix and were computed by the current weights.
- Weights change only between steps. A change drops every cached prefix and recomputes the rows in flight, so
  a later token is a sample of the new policy given the whole prefix. It aborts nothing.
- One request can fail (its ids, its length, its deadline, non-finite logits) without touching another.

It does not tokenize, does not stream, and does not load or move weights by itself. The sampler owns its
model object: nobody else may run or change it except through `update_weights`.

Legend: `S` slots, `A` active rows, `P` rows of a prefill, `V` vocabulary, `L` longest row.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import BoundaryError, ConfigError, ModelError
from agentrl.inference.sampler import SampleRequest, SampleResult
from agentrl.inference.slots import (
    SLOT_ATTENTION,
    DecodeView,
    PrefillView,
    Run,
    SlotStore,
    plan_runs,
)
from agentrl.types import FinishReason, LogProbKind, VersionSpan

IdArray = np.ndarray[Any, np.dtype[np.int64]]

SHARE_TOKENS = 16
"""A prefix shared with another session is copied only when it saves at least this many tokens of prefill."""
PREFILL_CHUNK = 1024
"""New tokens of one row in one forward; a longer prompt is prefilled in pieces."""
PREFILL_CELLS = 1 << 22
"""Attention cells (rows x new tokens x columns) of one prefill forward: bounds the mask to 16 MiB."""
PREFILL_TOKENS = 8192
"""Padded tokens of one prefill forward."""
CLOSE_S = 30.0
"""How long `close` waits for the worker: one step, or one weight update."""
PROBE_TOLERANCE = 1e-2
"""Largest log-prob difference between a cached and a plain forward at start. Real incompatibilities (a
sliding window, attention the slots do not know) are off by much more; rounding in bfloat16 stays below on a
short probe."""


class EngineState(StrEnum):
    RUNNING = "running"
    """Requests are admitted and decoded."""
    PAUSED = "paused"
    """Rows keep their place; nothing is computed."""
    UPDATING = "updating"
    """Weights are being changed."""
    CLOSED = "closed"
    """Over; every request is refused."""


_TRANSITIONS = {
    EngineState.RUNNING: {EngineState.PAUSED, EngineState.CLOSED},
    EngineState.PAUSED: {EngineState.RUNNING, EngineState.UPDATING, EngineState.CLOSED},
    EngineState.UPDATING: {EngineState.PAUSED},
    EngineState.CLOSED: set[EngineState](),
}


@dataclass(slots=True)
class EngineCounts:
    """What the engine did since it started; read at any time, exact when no request is running."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    decode_steps: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens whose keys and values were not computed again."""
    pauses: int = 0
    resumes: int = 0
    updates: int = 0


@dataclass(slots=True, eq=False)
class _Row:
    """One request in the engine. `length` counts prompt and generated tokens; `limit` is where it must
    end."""

    request: SampleRequest
    future: asyncio.Future[SampleResult]
    loop: asyncio.AbstractEventLoop
    prompt: IdArray
    limit: int
    started_at: float
    length: int = 0
    slot: _Slot | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(first generated token, version), in order."""
    generator: torch.Generator | None = None
    cancelled: bool = False

    @property
    def generated(self) -> int:
        return self.length - len(self.prompt)


@dataclass(slots=True, eq=False)
class _Slot:
    """Where a sequence lives. `ids` are the tokens whose keys and values are valid (for a row in flight: at
    least)."""

    index: int
    session: str | None = None
    ids: IdArray = field(default_factory=lambda: np.empty(0, np.int64))
    row: _Row | None = None
    used_at: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    """Something to do between two steps, on the worker thread."""

    run: Callable[[], None]
    future: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop
    drain: bool = False


@dataclass(slots=True)
class _Batch:
    """The active rows, sorted by slot, and what a step needs of them as tensors."""

    rows: list[_Row]
    slots: list[int]
    slots_A: Tensor
    next_A: Tensor
    """Position that the next sampled token takes."""
    ids_A: Tensor
    """Last token of each row: what is fed next."""
    draw: _Draw


@dataclass(slots=True)
class _Draw:
    """How each row of a batch is sampled. None means that no row needs it."""

    temperature_A1: Tensor | None
    greedy_A: Tensor | None
    stops_AK: Tensor
    seeded: list[tuple[int, torch.Generator]]
    truncated: list[tuple[int, int, float]]
    """(row, top_k, top_p)."""


def _common_prefix(a: IdArray, b: IdArray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


class LocalSampler:
    """Samples from `model` in this process. See the module for what holds.

    Args:
        model: any transformers causal LM with full attention; switched to evaluation mode and to slot
        attention.
        stop_token_ids: ids that end a generation, beside those of a request.
        name: what `SampleResult.model` says.
        version: policy version of the present weights; None for a policy without versions.
        max_slots: rows decoded together; more requests wait.
        max_context: prompt plus generation of one row; default the model's `max_position_embeddings`.
        idle_slots: finished sequences kept for prefix reuse beside the active rows; default `max_slots`.
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
        config: Any = model.config
        positions = int(getattr(config, "max_position_embeddings", 0) or 0)
        self._max_context = max_context or positions
        if self._max_context <= 1 or (positions and self._max_context > positions):
            raise ConfigError(
                f"max_context {max_context} does not fit a model with {positions} positions.",
                fix=f"Give a max_context between 2 and {positions or 'what the model was trained for'}.",
            )
        if max_slots < 1:
            raise ConfigError(f"max_slots is {max_slots}.", fix="Give at least 1.")
        _refuse_windows(config, self._max_context)
        self._model = model
        self._model.eval()
        self._device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype
        self._vocab = int(config.vocab_size)
        accepted = inspect.signature(model.forward).parameters
        self._cache_key = "cache" if "cache" in accepted else "past_key_values"
        self._keeps_logits = "logits_to_keep" in accepted
        self._stops = tuple(stop_token_ids)
        self._name = name
        self._version = version
        self._max_rows = max_slots
        self._max_slots = max_slots + (max_slots if idle_slots is None else idle_slots)
        self._store = SlotStore(max_capacity=self._max_context)
        self._tokens = torch.zeros(0, 0, dtype=torch.int64, device=self._device)
        self._log_probs = torch.zeros(0, 0, dtype=torch.float32, device=self._device)
        self._generator = torch.Generator(self._device)
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._slots: list[_Slot] = []
        self._rows: list[_Row] = []
        self._batch: _Batch | None = None
        self._waiting: deque[_Row] = deque()
        self._jobs: deque[_Job] = deque()
        self._clock = 0
        self._state = EngineState.RUNNING
        self.counts = EngineCounts()
        self._probe()
        self._lock = threading.Condition()
        self._inbox: list[_Row | _Job] = []
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"sampler-{name}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ for callers

    @property
    def model(self) -> str:
        return self._name

    @property
    def policy_version(self) -> int | None:
        return self._version

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def active(self) -> int:
        """Requests that are waiting or in flight right now."""
        return len(self._rows) + len(self._waiting) + len(self._inbox)

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample one generation. Cancelling the awaiting task frees the row at the next step boundary.

        Raises:
            ModelError: `context` (the prompt leaves no room), `token_id` (an id outside the vocabulary),
                `empty_prompt`, `deadline`, `nonfinite` (the logits were not numbers), `closed`, `engine`.
        """
        row = self._row(request)
        self._put(row)
        try:
            async with asyncio.timeout(request.deadline_s):
                return await row.future
        except TimeoutError as error:
            raise ModelError(
                f"waiting for {self._name} since {request.deadline_s:.1f} s: {row.generated} tokens so far,"
                f" {self.active} requests, engine {self._state}.",
                fix="Raise the deadline, lower max_tokens, or look for a weight update that does not end.",
                code="deadline",
                phase="sample",
            ) from error
        finally:
            if not row.future.done() or row.future.cancelled():
                row.cancelled = True
                self._wake()

    async def update_weights(
        self, change: Callable[[], None], version: int, *, drain: bool = False, deadline_s: float = 600.0
    ) -> None:
        """Run `change` (an in-place copy into the model's parameters) between two steps and stamp what
        follows.

        Rows in flight go on under the new weights with their keys and values recomputed; with `drain` they
        finish first and nobody new starts. If `change` raises, or leaves a parameter non-finite, the
        parameters are put back, the version stays, generation goes on, and the error is the caller's.

        Raises:
            ModelError: `version` (not above the present one), `update` (not finite), `deadline`, `closed`.
            Whatever `change` raises.
        """

        def run() -> None:
            self._update(change, version)

        await self._do(run, drain=drain, what=f"update to version {version}", deadline_s=deadline_s)

    async def pause(self, *, deadline_s: float = 60.0) -> None:
        """Stop computing at the next step boundary; rows keep their place. Refused unless running."""
        await self._do(self._pause, what="pause", deadline_s=deadline_s)

    async def resume(self, *, deadline_s: float = 60.0) -> None:
        """Go on. Refused unless paused."""
        await self._do(self._resume, what="resume", deadline_s=deadline_s)

    async def close(self) -> None:
        """End the worker; whatever is waiting or in flight fails with `closed`. Idempotent."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            raise ModelError(
                f"waiting for the worker of {self._name} since {CLOSE_S} s: a step or update does not end.",
                fix="The process must be ended.",
                code="deadline",
                phase="close",
            )

    # ------------------------------------------------------------------------------- from tasks to the worker

    def _row(self, request: SampleRequest) -> _Row:
        prompt = np.asarray(request.prompt_token_ids, np.int64)
        if not len(prompt):
            raise _refused("empty_prompt", "a request without prompt tokens.", "Give at least one token.")
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._vocab:
            raise _refused(
                "token_id",
                f"prompt ids from {prompt.min()} to {prompt.max()}, vocabulary {self._vocab}.",
                "Use the tokenizer of this model.",
            )
        if len(prompt) >= self._max_context:
            raise _refused(
                "context",
                f"a prompt of {len(prompt)} tokens leaves no room in a context of {self._max_context}.",
                "Shorten the history or raise max_context.",
            )
        row = _Row(
            request=request,
            future=asyncio.get_running_loop().create_future(),
            loop=asyncio.get_running_loop(),
            prompt=prompt,
            limit=min(len(prompt) + request.params.max_tokens, self._max_context),
            started_at=time.time(),
            length=len(prompt),
        )
        if request.params.seed is not None:
            row.generator = torch.Generator(self._device).manual_seed(request.params.seed)
        return row

    def _put(self, item: _Row | _Job) -> None:
        with self._lock:
            if self._closing:
                raise _refused("closed", f"{self._name} is closed.", "Start a new sampler.")
            self._inbox.append(item)
            self._lock.notify()

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify()

    async def _do(
        self, run: Callable[[], None], *, what: str, deadline_s: float, drain: bool = False
    ) -> None:
        loop = asyncio.get_running_loop()
        job = _Job(run=run, future=loop.create_future(), loop=loop, drain=drain)
        self._put(job)
        try:
            async with asyncio.timeout(deadline_s):
                await job.future
        except TimeoutError as error:
            raise ModelError(
                f"waiting for {what} of {self._name} since {deadline_s:.1f} s: engine {self._state},"
                f" {self.active} requests.",
                fix="Raise the deadline, or find the step that does not end.",
                code="deadline",
                phase="update",
            ) from error

    # -------------------------------------------------------------------------------------- the worker thread

    def _work(self) -> None:
        while True:
            with self._lock:
                while not (self._inbox or self._closing or self._can_step()):
                    self._lock.wait(timeout=1.0)
                    if any(row.cancelled for row in self._rows):
                        break
                for item in self._inbox:
                    if isinstance(item, _Job):
                        self._jobs.append(item)
                    else:
                        self._waiting.append(item)
                self._inbox.clear()
                if self._closing:
                    break
            self._drop_cancelled()
            self._run_jobs()
            if self._state is EngineState.RUNNING:
                self._step()
        self._state = EngineState.CLOSED
        error = _refused("closed", f"{self._name} was closed.", "Start a new sampler.")
        for row in [*self._rows, *self._waiting]:
            self._fail(row, error)
        for job in self._jobs:
            _settle(job.loop, job.future, error)
        self._waiting.clear()
        self._jobs.clear()

    def _can_step(self) -> bool:
        if self._jobs and not self._jobs[0].drain:
            return True
        return self._state is EngineState.RUNNING and bool(self._rows or self._waiting or self._jobs)

    def _run_jobs(self) -> None:
        while self._jobs:
            job = self._jobs[0]
            if job.future.cancelled():
                self._jobs.popleft()
                continue
            if job.drain and self._rows and self._state is EngineState.RUNNING:
                return
            self._jobs.popleft()
            error: Exception | None = None
            try:
                job.run()
            except Exception as caught:  # the boundary: it belongs to whoever asked
                error = caught
            _settle(job.loop, job.future, error)

    @torch.inference_mode()
    def _step(self) -> None:
        """One boundary: admit who fits, prefill them, then one decode step of everyone."""
        draining = bool(self._jobs)
        if self._waiting and not draining and len(self._rows) < self._max_rows:
            self._admit()
        if self._rows:
            try:
                self._decode()
            except Exception as error:  # the boundary: these rows fail, the engine lives
                self._fail_all(list(self._rows), error)

    def _drop_cancelled(self) -> None:
        for row in [row for row in self._rows if row.cancelled]:
            self.counts.cancelled += 1
            self._leave(row)
        if any(row.cancelled for row in self._waiting):
            kept = [row for row in self._waiting if not row.cancelled]
            self.counts.cancelled += len(self._waiting) - len(kept)
            self._waiting = deque(kept)

    # ------------------------------------------------------------------------------------------- admission

    def _admit(self) -> None:
        """Give waiting requests a slot and their first token. Prefixes known in another slot are copied; a
        prompt that shares its beginning with one admitted now waits for that one's prefill and copies it (a
        group)."""
        first: list[tuple[_Row, int]] = []
        second: list[tuple[_Row, int, _Slot]] = []
        while self._waiting and len(first) + len(second) + len(self._rows) < self._max_rows:
            row = self._waiting.popleft()
            if row.cancelled:
                self.counts.cancelled += 1
                continue
            self.counts.requests += 1
            slot, known, source = self._place(row)
            self._make_room(row)
            leader, shared = self._leader(row, [r for r, _ in first])
            if leader is not None and shared >= known + SHARE_TOKENS:
                second.append((row, shared, leader))
            else:
                if source is not None:
                    self._store.copy_prefix(source=source.index, target=slot.index, length=known)
                first.append((row, known))
        self._start(first)
        followers: list[tuple[_Row, int]] = []
        for row, shared, leader in second:
            ready = min(shared, len(leader.ids))  # 0 when the leader failed
            self._store.copy_prefix(source=leader.index, target=_slot_index(row), length=ready)
            followers.append((row, ready))
        self._start(followers)

    def _place(self, row: _Row) -> tuple[_Slot, int, _Slot | None]:
        """A slot for a row, how many of its tokens are known, and the slot to copy them from (None: they are
        here)."""
        usable = row.prompt[:-1]
        self._clock += 1
        own = [s for s in self._slots if s.row is None and s.session == row.request.session and len(s.ids)]
        best_own = max(own, key=lambda s: (_common_prefix(s.ids, usable), s.used_at), default=None)
        known = _common_prefix(best_own.ids, usable) if best_own is not None else 0
        source: _Slot | None = None
        if best_own is None or known < len(best_own.ids):
            for slot in self._slots:
                shared = _common_prefix(slot.ids, usable)
                if shared >= known + SHARE_TOKENS:
                    known, source = shared, slot
        if source is None and best_own is not None:
            slot = best_own
        else:
            slot = self._free_slot(keep=source)
            known = known if source is not None else 0
            source = None if source is slot else source
        slot.session = row.request.session
        slot.row = row
        slot.ids = row.prompt[:known]
        slot.used_at = self._clock
        row.slot = slot
        return slot, known, source

    def _free_slot(self, *, keep: _Slot | None) -> _Slot:
        """An empty slot, else a new one, else the idle one that was used longest ago (even `keep`, if it is
        the last: then its own tokens are simply taken over)."""
        idle = [s for s in self._slots if s.row is None]
        for slot in idle:
            if not len(slot.ids):
                return slot
        if len(self._slots) < self._max_slots:
            slot = _Slot(index=len(self._slots))
            self._slots.append(slot)
            return slot
        others = [s for s in idle if s is not keep] or idle
        return min(others, key=lambda s: s.used_at)

    def _leader(self, row: _Row, started: list[_Row]) -> tuple[_Slot | None, int]:
        best: tuple[_Slot | None, int] = (None, 0)
        for other in started:
            shared = _common_prefix(other.prompt, row.prompt[:-1])
            if shared > best[1]:
                best = (other.slot, shared)
        return best

    @torch.inference_mode()
    def _make_room(self, row: _Row) -> None:
        """Grow the buffers, by doubling, until the row's slot exists and holds its limit; then write its
        prompt."""
        slots, capacity = self._tokens.shape
        if len(self._slots) > slots or row.limit > capacity:
            if len(self._slots) > slots:
                slots = min(self._max_slots, max(len(self._slots), 2 * slots, 8))
            self._store.reserve(slots=slots, capacity=row.limit)
            self._tokens = _resized(self._tokens, self._store.slots, self._store.capacity)
            self._log_probs = _resized(self._log_probs, self._store.slots, self._store.capacity)
        self._tokens[_slot_index(row), : len(row.prompt)] = torch.from_numpy(row.prompt).to(self._device)

    def _start(self, rows: list[tuple[_Row, int]]) -> None:
        """Prefill what is not known of each row and sample its first token."""
        if not rows:
            return
        self._rows.extend(row for row, _ in rows)
        self._batch = None
        try:
            spans = [(row, known, row.length) for row, known in rows]
            for part, logits in self._prefill(spans, logits=True):
                for row, known, end in part:
                    row.versions.append((0, -1 if self._version is None else self._version))
                    self.counts.prefilled_tokens += end - known
                    self.counts.reused_tokens += known
                    assert row.slot is not None
                    row.slot.ids = row.prompt
                batch = self._batch_of([row for row, _, _ in part])
                assert logits is not None
                self._sample(batch, logits)
        except Exception as error:  # the boundary: these rows fail, the engine lives
            self._fail_all([row for row, _ in rows if row.slot is not None], error)

    # --------------------------------------------------------------------------------------------- forwards

    @torch.inference_mode()
    def _forward(
        self, ids: Tensor, positions: Tensor, *, mask: Tensor | None, view: Any, runs: list[Run] | None
    ) -> Tensor:
        """Logits of the last column `[rows, V]`."""
        keywords: dict[str, Any] = {self._cache_key: view, "use_cache": True}
        if self._keeps_logits:
            keywords["logits_to_keep"] = 1
        if runs is not None:
            keywords["slot_runs"] = runs
        if mask is None:
            mask = _NO_MASK.to(self._device)
        output = self._model(input_ids=ids, attention_mask=mask, position_ids=positions, **keywords)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _prefill(
        self, spans: list[tuple[_Row, int, int]], *, logits: bool
    ) -> list[tuple[list[tuple[_Row, int, int]], Tensor | None]]:
        """Compute keys and values of tokens `start` to `end` of each row; with `logits`, those after the
        last one.

        Rows are sorted by new tokens and packed under the bounds above, right-aligned, so that every row's
        last token is in the last column. Padding is written nowhere.
        """
        rest: list[tuple[_Row, int, int]] = []
        for row, start, end in spans:
            while end - start > PREFILL_CHUNK:
                self._prefill_part([(row, start, start + PREFILL_CHUNK)])
                start += PREFILL_CHUNK
            if end > start:
                rest.append((row, start, end))
        rest.sort(key=lambda span: span[2] - span[1])
        parts: list[list[tuple[_Row, int, int]]] = []
        part: list[tuple[_Row, int, int]] = []
        for span in rest:
            grown = [*part, span]
            tokens = len(grown) * (span[2] - span[1])
            columns = max(end for _, _, end in grown)
            if part and (tokens > PREFILL_TOKENS or tokens * columns > PREFILL_CELLS):
                parts.append(part)
                grown = [span]
            part = grown
        if part:
            parts.append(part)
        for part in parts:
            part.sort(key=lambda span: _slot_index(span[0]))
        done: list[tuple[list[tuple[_Row, int, int]], Tensor | None]] = []
        for part in parts:
            last = self._prefill_part(part)
            done.append((part, last if logits else None))
        return done

    @torch.inference_mode()
    def _prefill_part(self, spans: list[tuple[_Row, int, int]]) -> Tensor:
        rows, width = len(spans), max(end - start for _, start, end in spans)
        length = max(end for _, _, end in spans)
        slots = np.array([row.slot.index for row, _, _ in spans if row.slot is not None])
        positions = np.zeros((rows, width), np.int64)
        real = np.zeros((rows, width), bool)
        for at, (_, start, end) in enumerate(spans):
            positions[at, width - (end - start) :] = np.arange(start, end)
            real[at, width - (end - start) :] = True
        write_rows, write_columns = np.nonzero(real)
        device = self._device
        slots_P = torch.from_numpy(slots).to(device)
        positions_Pn = torch.from_numpy(positions).to(device)
        ids = self._tokens[slots_P[:, None], positions_Pn]
        hidden = torch.arange(length, device=device) > positions_Pn[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=device)
        mask.masked_fill_(hidden, torch.finfo(self._dtype).min)
        view = PrefillView(
            self._store,
            slots_P,
            length=length,
            write_rows=torch.from_numpy(write_rows).to(device),
            write_columns=torch.from_numpy(write_columns).to(device),
            write_slots=torch.from_numpy(slots[write_rows]).to(device),
            write_positions=torch.from_numpy(positions[write_rows, write_columns]).to(device),
        )
        return self._forward(ids, positions_Pn, mask=mask[:, None], view=view, runs=None)

    @torch.inference_mode()
    def _decode(self) -> None:
        if self._batch is None:
            self._batch = self._batch_of(self._rows)
        batch = self._batch
        positions = batch.next_A - 1
        runs = plan_runs(batch.slots, [row.length for row in batch.rows], positions, dtype=self._dtype)
        view = DecodeView(self._store, batch.slots_A, positions)
        logits = self._forward(batch.ids_A[:, None], positions[:, None], mask=None, view=view, runs=runs)
        self.counts.decode_steps += 1
        self._sample(batch, logits)

    # --------------------------------------------------------------------------------------------- sampling

    @torch.inference_mode()
    def _batch_of(self, rows: list[_Row]) -> _Batch:
        ordered = sorted(rows, key=_slot_index)
        device = self._device
        slots = [_slot_index(row) for row in ordered]
        slots_A = torch.tensor(slots, device=device)
        next_A = torch.tensor([row.length for row in ordered], device=device)
        params = [row.request.params for row in ordered]
        stops = [(*self._stops, *p.stop_token_ids) for p in params]
        width = max(1, *(len(s) for s in stops))
        draw = _Draw(
            temperature_A1=None
            if all(p.temperature in (0.0, 1.0) for p in params)
            else torch.tensor([[p.temperature or 1.0] for p in params], device=device, dtype=torch.float32),
            greedy_A=None
            if all(p.temperature > 0 for p in params)
            else torch.tensor([p.temperature == 0 for p in params], device=device),
            stops_AK=torch.tensor([[*s, *([-1] * (width - len(s)))] for s in stops], device=device),
            seeded=[(i, row.generator) for i, row in enumerate(ordered) if row.generator is not None],
            truncated=[
                (i, p.top_k, p.top_p)
                for i, p in enumerate(params)
                if p.temperature > 0 and (p.top_k or p.top_p < 1)
            ],
        )
        return _Batch(
            rows=ordered,
            slots=slots,
            slots_A=slots_A,
            next_A=next_A,
            ids_A=self._tokens[slots_A, next_A - 1],
            draw=draw,
        )

    @torch.inference_mode()
    def _sample(self, batch: _Batch, logits_AV: Tensor) -> None:
        """Draw one token per row, write it into the token buffer, end the rows that are done."""
        draw = batch.draw
        logits_AV = logits_AV.float()
        if draw.temperature_A1 is not None:
            logits_AV = logits_AV / draw.temperature_A1
        for i, top_k, top_p in draw.truncated:
            logits_AV[i] = _truncated(logits_AV[i], top_k, top_p)
        logp_AV = torch.log_softmax(logits_AV, dim=-1)
        noise_AV = torch.empty_like(logp_AV).exponential_(generator=self._generator)
        for i, generator in draw.seeded:
            noise_AV[i].exponential_(generator=generator)
        if draw.greedy_A is not None:
            noise_AV[draw.greedy_A] = 1.0
        # argmax(log p - log E) with E ~ Exp(1) is a sample of p (Gumbel-max), and the argmax of p where E is
        # 1.
        ids_A = (logp_AV - noise_AV.clamp_min_(1e-30).log_()).argmax(dim=-1)
        logp_A = logp_AV.gather(1, ids_A[:, None])[:, 0]
        self._tokens[batch.slots_A, batch.next_A] = ids_A
        self._log_probs[batch.slots_A, batch.next_A] = logp_A
        batch.ids_A = ids_A
        batch.next_A += 1
        stopped_A = (ids_A[:, None] == draw.stops_AK).any(dim=1)
        stopped, broken = torch.stack((stopped_A, ~logp_A.isfinite())).tolist()
        self.counts.decoded_tokens += len(batch.rows)
        done: list[tuple[_Row, FinishReason]] = []
        lost: list[_Row] = []
        for row, stop, bad in zip(batch.rows, stopped, broken, strict=True):
            row.length += 1
            if bad:
                lost.append(row)
            elif stop:
                done.append((row, FinishReason.STOP))
            elif row.length >= row.limit:
                done.append((row, FinishReason.LENGTH))
        for row, reason in done:
            self._finish(row, reason)
        for row in lost:
            assert row.slot is not None
            self._store.clear(row.slot.index)
            row.slot.ids = row.prompt[:0]
            self._fail(
                row,
                ModelError(
                    f"the logits of {self._name} were not finite after {row.generated - 1} tokens.",
                    fix="Look at the last weight update; the request itself may be repeated.",
                    code="nonfinite",
                    phase="sample",
                ),
            )

    def _finish(self, row: _Row, reason: FinishReason) -> None:
        assert row.slot is not None
        slot, start = row.slot, len(row.prompt)
        ids = self._tokens[slot.index, : row.length].tolist()
        ends = [first for first, _ in row.versions[1:]] + [row.generated]
        params = row.request.params
        raw = params.temperature == 0
        result = SampleResult(
            request_id=row.request.id,
            prompt_token_ids=tuple(ids[:start]),
            token_ids=tuple(ids[start:]),
            log_probs=tuple(self._log_probs[slot.index, start : row.length].tolist()),
            log_prob_kind=LogProbKind.RAW if raw else LogProbKind.PROCESSED,
            policy_versions=()
            if self._version is None
            else tuple(
                VersionSpan(version=version, start=first, end=end)
                for (first, version), end in zip(row.versions, ends, strict=True)
                if end > first
            ),
            finish_reason=reason,
            model=self._name,
            started_at=row.started_at,
            finished_at=max(row.started_at, time.time()),
        )
        slot.ids = np.array(ids[:-1], np.int64)  # the last token was sampled, not fed
        self.counts.finished += 1
        self._leave(row)
        _settle(row.loop, row.future, result)

    def _leave(self, row: _Row) -> None:
        self._rows.remove(row)
        self._batch = None
        if row.slot is not None:
            row.slot.row = None
            row.slot = None

    def _fail(self, row: _Row, error: Exception) -> None:
        self.counts.failed += 1
        if row in self._rows:
            self._leave(row)
        _settle(row.loop, row.future, error)

    def _fail_all(self, rows: list[_Row], error: Exception) -> None:
        for row in rows:
            if row.slot is not None:
                row.slot.ids = row.prompt[:0]
            self._fail(
                row,
                error
                if isinstance(error, BoundaryError)
                else ModelError(
                    f"{type(error).__name__} in the engine of {self._name}: {error}",
                    fix="If it is memory, lower max_slots or max_context.",
                    code="engine",
                    phase="sample",
                ),
            )

    # ---------------------------------------------------------------------------------------------- updates

    def _go(self, state: EngineState) -> None:
        if state not in _TRANSITIONS[self._state]:
            raise _refused(
                "state",
                f"the engine is {self._state} and can not become {state}.",
                "Pair every pause with one resume.",
            )
        self._state = state

    def _pause(self) -> None:
        self._go(EngineState.PAUSED)
        self.counts.pauses += 1

    def _resume(self) -> None:
        self._go(EngineState.RUNNING)
        self.counts.resumes += 1

    def _update(self, change: Callable[[], None], version: int) -> None:
        if self._version is not None and version <= self._version:
            raise _refused(
                "version",
                f"version {version} is not above the present {self._version}.",
                "Publish with the next version number.",
            )
        resume = self._state is EngineState.RUNNING
        if resume:
            self._pause()
        self._go(EngineState.UPDATING)
        try:
            with torch.no_grad():
                before = [p.detach().clone() for p in self._model.parameters()]
                try:
                    change()
                    self._refuse_nonfinite(version)
                except BaseException:
                    for parameter, old in zip(self._model.parameters(), before, strict=True):
                        parameter.copy_(old)
                    raise
            self._version = version
            self.counts.updates += 1
        finally:
            self._go(EngineState.PAUSED)
            if resume:
                self._resume()
        for slot in self._slots:
            if slot.row is None:
                slot.ids = slot.ids[:0]
        for row in self._rows:
            assert row.slot is not None
            row.slot.ids = row.prompt[:0]
            row.versions.append((row.generated, version))
        if self._rows:
            try:
                self._prefill([(row, 0, row.length - 1) for row in self._rows], logits=False)
                for row in self._rows:
                    assert row.slot is not None
                    row.slot.ids = row.prompt
            except Exception as error:  # the boundary: these rows fail, the update stands
                self._fail_all(list(self._rows), error)

    def _refuse_nonfinite(self, version: int) -> None:
        for name, parameter in self._model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise ModelError(
                    f"weights of version {version} are not finite in {name}; the old weights stay.",
                    fix="Look at the learner's last step.",
                    code="update",
                    phase="update",
                    retryable=False,
                )

    # ------------------------------------------------------------------------------------------------ start

    @torch.inference_mode()
    def _probe(self) -> None:
        """Run a few tokens plainly, and again through the slots: refuse a model whose attention they do not
        carry."""
        count = min(8, self._max_context)
        ids = torch.arange(count, device=self._device)[None] % self._vocab
        plain = torch.log_softmax(self._model(input_ids=ids, use_cache=False).logits[0].float(), -1)
        set_attention = getattr(self._model, "set_attn_implementation", None)
        if set_attention is None:
            raise ConfigError(
                f"{type(self._model).__name__} has no exchangeable attention.",
                fix="Use a causal LM that supports attention backends, or serve it with vLLM.",
            )
        set_attention(SLOT_ATTENTION)
        self._store.reserve(slots=2, capacity=count)
        slots = torch.tensor([1], device=self._device)
        try:
            worst = 0.0
            for at in range(count):
                position = torch.tensor([at], device=self._device)
                runs = plan_runs([1], [at + 1], position, dtype=self._dtype)
                logits = self._forward(
                    ids[:, at : at + 1],
                    position[:, None],
                    mask=None,
                    view=DecodeView(self._store, slots, position),
                    runs=runs,
                )
                worst = max(worst, float((torch.log_softmax(logits[0].float(), -1) - plain[at]).abs().max()))
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{type(self._model).__name__} does not run with slot attention: {error}",
                fix="Serve the model with vLLM.",
            ) from error
        limit = PROBE_TOLERANCE if self._dtype is torch.float32 else 50 * PROBE_TOLERANCE
        if not worst < limit:
            raise ConfigError(
                f"{type(self._model).__name__} through slots is off its plain forward by {worst:.3g} in log-prob.",
                fix="Its attention is not plain causal attention; serve the model with vLLM.",
            )


_NO_MASK = torch.zeros(1, 1, 1, 1)
"""A 4-D mask tells transformers to build none; a decode step masks per run instead."""


def _slot_index(row: _Row) -> int:
    assert row.slot is not None
    return row.slot.index


def _resized(old: Tensor, rows: int, columns: int) -> Tensor:
    new = old.new_zeros(rows, columns)
    new[: old.shape[0], : old.shape[1]] = old
    return new


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


def _refused(code: str, message: str, fix: str) -> ModelError:
    return ModelError(message, fix=fix, code=code, phase="sample", retryable=False)


def _truncated(logits_V: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits with everything outside top-k, then outside the smallest set of mass `top_p`, at minus
    infinity."""
    ordered, order = logits_V.sort(descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k:
        keep[top_k:] = False
    if top_p < 1:
        mass = torch.softmax(ordered.masked_fill(~keep, -torch.inf), -1).cumsum(-1)
        keep[1:] &= mass[:-1] < top_p
    return torch.full_like(logits_V, -torch.inf).scatter(0, order[keep], ordered[keep])


def _refuse_windows(config: Any, max_context: int) -> None:
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} and (window is None or window < max_context):
        raise ConfigError(
            f"the model has layers of kind {', '.join(sorted(kinds - {'full_attention'}))}.",
            fix="Slots hold full attention only: lower max_context below the window, or use vLLM.",
        )
    uses = getattr(config, "use_sliding_window", True)
    if not kinds and window is not None and uses and window < max_context:
        raise ConfigError(
            f"the model attends to {window} tokens, the context is {max_context}.",
            fix=f"Set max_context to at most {window}, or serve the model with vLLM.",
        )
