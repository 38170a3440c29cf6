"""Continuous batching over one transformers model: rows join and leave at step boundaries. Synchronous.

`Engine.step` admits who fits, prefills them, and decodes one token of every active row, at about the cost of
one bare forward. `LocalSampler` gives it a thread and an asynchronous face; nothing here knows of tasks or
loops.

Invariants
- The ids that are fed come from the engine's token buffer, and a result's echo is read back from it.
- Keys and values are reused only for tokens that are an exact prefix and were computed by the current
  weights.
- A row that fails (non-finite logits, an exception in its forward) takes no other batch with it.

Legend: `S` slots, `A` active rows, `P` rows of a prefill, `n` new tokens, `L` longest row.
"""

from __future__ import annotations

import inspect
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.errors import BoundaryError, ConfigError, ModelError
from agentrl.inference.draw import Draw
from agentrl.inference.sampler import SampleRequest, SampleResult
from agentrl.inference.slots import SLOT_ATTENTION, DecodeView, PrefillView, Run, SlotStore, plan_runs
from agentrl.inference.states import EngineState, moved, refused
from agentrl.types import FinishReason, LogProbKind, VersionSpan

IdArray = NDArray[np.int64]

SHARE_TOKENS = 16
"""A prefix known in another slot is copied only when that saves at least this many tokens of prefill."""
PREFILL_CHUNK = 1024
"""New tokens of one row in one forward; a longer prompt is prefilled in pieces."""
PREFILL_TOKENS = 8192
"""Padded tokens of one prefill forward."""
PREFILL_CELLS = 1 << 22
"""Attention cells (rows x new tokens x columns) of one prefill forward: bounds its mask to 16 MiB."""
MEMORY_SHARE = 0.5
"""By default there are fewer idle slots when all slots, full, would take more of the memory than this."""
MIN_SLOTS = 8
"""Slots allocated at first; they double from there."""
PROBE_TOKENS = 8
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest log-prob difference at start between the slots and a plain forward. An attention that slots do not
carry is off by much more; other types round more coarsely."""
PROBE_TOLERANCE_COARSE = 0.5


@dataclass(slots=True)
class EngineCounts:
    """What the engine did since it started; exact when no request is running."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    decode_steps: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens whose keys and values were not computed again."""
    pauses: int = 0
    resumes: int = 0
    updates: int = 0


@dataclass(slots=True, eq=False)
class Row:
    """One request. `length` counts prompt and generated tokens; at `limit` it must end."""

    request: SampleRequest
    prompt: IdArray
    limit: int
    settle: Callable[[SampleResult | Exception], None]
    """Called once, on the engine's thread, unless the row is cancelled."""
    started_at: float
    length: int
    generator: torch.Generator | None
    head: bytes
    slot: Slot | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(first generated token, version), in order."""
    cancelled: bool = False

    @property
    def generated(self) -> int:
        return self.length - len(self.prompt)

    @property
    def place(self) -> int:
        """Index of its slot; it must have one."""
        assert self.slot is not None
        return self.slot.index


@dataclass(slots=True, eq=False)
class Slot:
    """Where a sequence lives. `ids` are the tokens whose keys and values are known to be valid."""

    index: int
    session: str | None = None
    ids: IdArray = field(default_factory=lambda: np.empty(0, np.int64))
    head: bytes = b""
    """`head_of(ids)`: two sequences can only share enough to be worth a copy when their heads are equal."""
    row: Row | None = None
    used_at: int = 0

    def hold(self, ids: IdArray) -> None:
        """Say which tokens' keys and values are valid."""
        self.ids, self.head = ids, head_of(ids)


@dataclass(slots=True)
class Batch:
    """Rows that step together, sorted by slot, and what a step needs of them as tensors."""

    rows: list[Row]
    slots: list[int]
    slots_A: Tensor
    next_A: Tensor
    """Position that the next sampled token takes."""
    ids_A: Tensor
    """Last token of each row: what is fed next."""
    draw: Draw


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `end` of a row, to be computed."""

    row: Row
    start: int
    end: int

    @property
    def width(self) -> int:
        return self.end - self.start


class Engine:
    """See the module. All methods but `row` and the properties belong to one thread."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        stop_token_ids: tuple[int, ...],
        name: str,
        version: int | None,
        max_slots: int,
        idle_slots: int | None,
        max_context: int | None,
        seed: int | None,
    ) -> None:
        config: Any = model.config
        positions = int(getattr(config, "max_position_embeddings", 0) or 0)
        self.max_context = max_context or positions
        if self.max_context <= 1 or (positions and self.max_context > positions):
            raise ConfigError(
                f"max_context {max_context} does not fit a model with {positions} positions.",
                fix=f"Give a max_context between 2 and {positions or 'what the model was trained for'}.",
            )
        if max_slots < 1 or (idle_slots is not None and idle_slots < 0):
            raise ConfigError(
                f"max_slots {max_slots}, idle_slots {idle_slots}.", fix="Give at least 1 and 0."
            )
        _refuse_windows(config, self.max_context)
        self.name = name
        self.version = version
        self.state = EngineState.RUNNING
        self.counts = EngineCounts()
        self._model = model.eval()
        self._device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype
        self._vocab = int(config.vocab_size)
        accepted = inspect.signature(model.forward).parameters
        self._cache_key = "cache" if "cache" in accepted else "past_key_values"
        self._keeps_logits = "logits_to_keep" in accepted
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self._device)
        self._stops = tuple(stop_token_ids)
        self._max_rows = max_slots
        self._store = SlotStore(max_capacity=self.max_context)
        self._tokens = torch.zeros(0, 0, dtype=torch.int64, device=self._device)
        self._log_probs = torch.zeros(0, 0, dtype=torch.float32, device=self._device)
        self._generator = torch.Generator(self._device)
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._slots: list[Slot] = []
        self._rows: list[Row] = []
        self._waiting: deque[Row] = deque()
        self._batch: Batch | None = None
        self._clock = 0
        self._probe()
        self._max_slots = max_slots + self._idle_slots(idle_slots)

    # -------------------------------------------------------------------------------------------- requests

    def row(self, request: SampleRequest, settle: Callable[[SampleResult | Exception], None]) -> Row:
        """A request as a row, not yet submitted. Safe on any thread.

        Raises:
            ModelError: `empty_prompt`, `token_id` (outside the vocabulary), `context` (no room left).
        """
        prompt = np.asarray(request.prompt_token_ids, np.int64)
        if not len(prompt):
            raise refused("empty_prompt", "a request without prompt tokens.", "Give at least one token.")
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._vocab:
            raise refused(
                "token_id",
                f"prompt ids from {prompt.min()} to {prompt.max()}, vocabulary {self._vocab}.",
                "Use the tokenizer of this model.",
            )
        if len(prompt) >= self.max_context:
            raise refused(
                "context",
                f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.max_context}.",
                "Shorten the history or raise max_context.",
            )
        seed = request.params.seed
        return Row(
            request=request,
            prompt=prompt,
            limit=min(len(prompt) + request.params.max_tokens, self.max_context),
            settle=settle,
            started_at=time.time(),
            length=len(prompt),
            generator=None if seed is None else torch.Generator(self._device).manual_seed(seed),
            head=head_of(prompt[:-1]),
        )

    def submit(self, row: Row) -> None:
        """Let a row wait for a slot."""
        self._waiting.append(row)

    @property
    def in_flight(self) -> int:
        """Rows that hold a slot."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @torch.inference_mode()
    def step(self, *, admit: bool = True) -> None:
        """One boundary: admit who fits, prefill them, then one decode step of everyone."""
        if admit and self._waiting and len(self._rows) < self._max_rows:
            self._admit()
        if self._rows:
            try:
                self._decode()
            except Exception as error:  # the boundary: these rows fail, the engine lives
                self._fail_all(list(self._rows), error)

    def drop_cancelled(self) -> None:
        """Free the slots of rows that nobody waits for any more. What they computed stays reusable."""
        for row in [row for row in self._rows if row.cancelled]:
            self.counts.cancelled += 1
            self._leave(row)
        if any(row.cancelled for row in self._waiting):
            kept = [row for row in self._waiting if not row.cancelled]
            self.counts.cancelled += len(self._waiting) - len(kept)
            self._waiting = deque(kept)

    def abort_all(self) -> None:
        """End every row in flight as it stands: its tokens so far, and `FinishReason.ABORT`."""
        for row in list(self._rows):
            self._finish(row, FinishReason.ABORT)

    def end(self, error: ModelError) -> None:
        """Fail everything and refuse what comes."""
        self.state = EngineState.CLOSED
        for row in [*self._rows, *self._waiting]:
            self._fail(row, error)
        self._waiting.clear()

    # ------------------------------------------------------------------------------------------- admission

    def _admit(self) -> None:
        """Give waiting rows a slot and their first token.

        A prefix known in another slot is copied. A prompt that begins like one admitted now (a group) waits
        for that one's prefill and copies it.
        """
        leaders: list[Span] = []
        followers: list[tuple[Row, Slot, int]] = []
        while self._waiting and len(self._rows) + len(leaders) + len(followers) < self._max_rows:
            row = self._waiting.popleft()
            if row.cancelled:
                self.counts.cancelled += 1
                continue
            self.counts.requests += 1
            try:
                known = self._place(row)
            except Exception as error:  # the boundary: no memory for this row
                self._fail_all([row], error)
                continue
            leader, shared = None, known + SHARE_TOKENS
            for span in [span for span in leaders if row.head and span.row.head == row.head]:
                common = common_prefix(span.row.prompt, row.prompt[:-1])
                if common >= shared:
                    leader, shared = span.row.slot, common
            if leader is None:
                leaders.append(Span(row, known, row.length))
            else:
                followers.append((row, leader, shared))
        self._start(leaders)
        second: list[Span] = []
        for row, leader, shared in followers:
            ready = min(shared, len(leader.ids))  # nothing, when the leader failed
            self._store.copy_prefix(source=leader.index, target=row.place, length=ready)
            second.append(Span(row, ready, row.length))
        self._start(second)

    def _place(self, row: Row) -> int:
        """Give a row a slot that holds as much of its prompt as is known anywhere; returns how much that is.

        At least the last prompt token is always computed, because the first sample needs its logits.
        """
        usable = row.prompt[:-1]
        self._clock += 1
        own = [s for s in self._slots if s.row is None and s.session == row.request.session and len(s.ids)]
        mine = max(own, key=lambda s: (common_prefix(s.ids, usable), s.used_at), default=None)
        known = common_prefix(mine.ids, usable) if mine is not None else 0
        source: Slot | None = None
        if mine is None or known < len(mine.ids):
            for slot in [slot for slot in self._slots if row.head and slot.head == row.head]:
                shared = common_prefix(slot.ids, usable)
                if shared >= known + SHARE_TOKENS:
                    known, source = shared, slot
        if mine is not None and source is None:
            slot = mine
        else:
            slot = self._free_slot(keep=source)
            if source is None:
                known = 0
        slot.session, slot.row, slot.used_at = row.request.session, row, self._clock
        row.slot = slot
        self._make_room(row)
        if source is not None and source is not slot:
            self._store.copy_prefix(source=source.index, target=slot.index, length=known)
        slot.hold(row.prompt[:known])
        return known

    def _free_slot(self, *, keep: Slot | None) -> Slot:
        """An empty slot, else a new one, else the idle one that was used longest ago. `keep` only if it is
        the last
        one: then its own tokens are taken over instead of copied."""
        idle = [s for s in self._slots if s.row is None]
        for slot in idle:
            if not len(slot.ids):
                return slot
        if len(self._slots) < self._max_slots:
            slot = Slot(index=len(self._slots))
            self._slots.append(slot)
            return slot
        return min([s for s in idle if s is not keep] or idle, key=lambda s: s.used_at)

    def _make_room(self, row: Row) -> None:
        """Grow the buffers, by doubling, until the row's slot exists and holds its limit; write its
        prompt."""
        slots, capacity = self._tokens.shape
        if len(self._slots) > slots or row.limit > capacity:
            if len(self._slots) > slots:
                slots = min(self._max_slots, max(len(self._slots), 2 * slots, MIN_SLOTS))
            self._store.reserve(slots=slots, capacity=row.limit)
            self._tokens = _resized(self._tokens, self._store.slots, self._store.capacity)
            self._log_probs = _resized(self._log_probs, self._store.slots, self._store.capacity)
        self._tokens[row.place, : len(row.prompt)] = torch.from_numpy(row.prompt).to(self._device)

    def _start(self, spans: list[Span]) -> None:
        """Prefill what is not known of each row and sample its first token."""
        if not spans:
            return
        self._rows.extend(span.row for span in spans)
        self._batch = None
        for part in self._parts(spans):
            try:
                logits = self._prefill(part)
                for span in part:
                    row = span.row
                    row.versions.append((0, -1 if self.version is None else self.version))
                    self.counts.prefilled_tokens += span.width
                    self.counts.reused_tokens += span.start
                    assert row.slot is not None
                    row.slot.hold(row.prompt)
                self._sample(self._batch_of([span.row for span in part]), logits)
            except Exception as error:  # the boundary: these rows fail, the engine lives
                self._fail_all([span.row for span in part if span.row.slot is not None], error)

    # -------------------------------------------------------------------------------------------- forwards

    def _forward(
        self, ids: Tensor, positions: Tensor, *, mask: Tensor, view: Any, runs: list[Run] | None
    ) -> Tensor:
        """Logits of the last column, `[rows, V]`."""
        keywords: dict[str, Any] = {self._cache_key: view, "use_cache": True}
        if self._keeps_logits:
            keywords["logits_to_keep"] = 1
        if runs is not None:
            keywords["slot_runs"] = runs
        output = self._model(input_ids=ids, attention_mask=mask, position_ids=positions, **keywords)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _parts(self, spans: list[Span]) -> list[list[Span]]:
        """Spans cut and packed into forwards of bounded size, similar widths together."""
        whole: list[Span] = []
        parts: list[list[Span]] = []
        for span in spans:
            start = span.start
            while span.end - start > PREFILL_CHUNK:
                self._prefill([Span(span.row, start, start + PREFILL_CHUNK)])
                start += PREFILL_CHUNK
            whole.append(Span(span.row, start, span.end))
        for span in sorted(whole, key=lambda s: s.width):
            part = [*parts[-1], span] if parts else [span]
            tokens, columns = len(part) * span.width, max(s.end for s in part)
            if parts and tokens <= PREFILL_TOKENS and tokens * columns <= PREFILL_CELLS:
                parts[-1] = part
            else:
                parts.append([span])
        return [sorted(part, key=lambda s: s.row.place) for part in parts]

    def _prefill(self, spans: list[Span]) -> Tensor:
        """Compute keys and values of some spans; returns the logits after the last token of each.

        New tokens are right-aligned, so that every row's last one is in the last column. Padding looks at the
        row's first token and is written nowhere.
        """
        width, length = max(s.width for s in spans), max(s.end for s in spans)
        slots = np.array([span.row.place for span in spans])
        positions = np.zeros((len(spans), width), np.int64)
        real = np.zeros((len(spans), width), bool)
        for at, span in enumerate(spans):
            positions[at, width - span.width :] = np.arange(span.start, span.end)
            real[at, width - span.width :] = True
        write_rows, write_columns = np.nonzero(real)
        device = self._device
        slots_P = torch.from_numpy(slots).to(device)
        positions_Pn = torch.from_numpy(positions).to(device)
        ids_Pn = self._tokens[slots_P[:, None], positions_Pn]
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
        return self._forward(ids_Pn, positions_Pn, mask=mask[:, None], view=view, runs=None)

    def _decode(self) -> None:
        if self._batch is None:
            self._batch = self._batch_of(self._rows)
        batch = self._batch
        positions_A = batch.next_A - 1
        runs = plan_runs(batch.slots, [row.length for row in batch.rows], positions_A, dtype=self._dtype)
        view = DecodeView(self._store, batch.slots_A, positions_A)
        logits = self._forward(
            batch.ids_A[:, None], positions_A[:, None], mask=self._no_mask, view=view, runs=runs
        )
        self.counts.decode_steps += 1
        self._sample(batch, logits)

    # ------------------------------------------------------------------------------------- samples and ends

    def _batch_of(self, rows: list[Row]) -> Batch:
        ordered = sorted(rows, key=lambda row: row.place)
        slots = [row.place for row in ordered]
        slots_A = torch.tensor(slots, device=self._device)
        next_A = torch.tensor([row.length for row in ordered], device=self._device)
        draw = Draw.of(
            [row.request.params for row in ordered],
            [row.generator for row in ordered],
            stop_token_ids=self._stops,
            device=self._device,
        )
        return Batch(
            rows=ordered,
            slots=slots,
            slots_A=slots_A,
            next_A=next_A,
            ids_A=self._tokens[slots_A, next_A - 1],
            draw=draw,
        )

    def _sample(self, batch: Batch, logits_AV: Tensor) -> None:
        """Draw one token per row, write it into the token buffer, end the rows that are done."""
        ids_A, logp_A = batch.draw.sample(logits_AV, self._generator)
        self._tokens[batch.slots_A, batch.next_A] = ids_A
        self._log_probs[batch.slots_A, batch.next_A] = logp_A
        batch.ids_A = ids_A
        batch.next_A += 1
        stopped, finite = torch.stack((batch.draw.stopped(ids_A), logp_A.isfinite())).tolist()
        self.counts.generated_tokens += len(batch.rows)
        ended: list[tuple[Row, FinishReason]] = []
        broken: list[Row] = []
        for row, stop, good in zip(batch.rows, stopped, finite, strict=True):
            row.length += 1
            if not good:
                broken.append(row)
            elif stop:
                ended.append((row, FinishReason.STOP))
            elif row.length >= row.limit:
                ended.append((row, FinishReason.LENGTH))
        for row, reason in ended:
            self._finish(row, reason)
        for row in broken:
            self._store.clear(row.place)
            self._fail_all(
                [row],
                ModelError(
                    f"the logits of {self.name} were not finite after {row.generated - 1} tokens.",
                    fix="Look at the last weight update; the request itself may be repeated.",
                    code="nonfinite",
                    phase="sample",
                ),
            )

    def _finish(self, row: Row, reason: FinishReason) -> None:
        assert row.slot is not None
        start = len(row.prompt)
        ids = self._tokens[row.place, : row.length].tolist()
        ends = [first for first, _ in row.versions[1:]] + [row.generated]
        spans = (
            VersionSpan(version=version, start=first, end=end)
            for (first, version), end in zip(row.versions, ends, strict=True)
            if end > first
        )
        greedy = row.request.params.temperature == 0
        result = SampleResult(
            request_id=row.request.id,
            prompt_token_ids=tuple(ids[:start]),
            token_ids=tuple(ids[start:]),
            log_probs=tuple(self._log_probs[row.place, start : row.length].tolist()),
            log_prob_kind=LogProbKind.RAW if greedy else LogProbKind.PROCESSED,
            policy_versions=() if self.version is None else tuple(spans),
            finish_reason=reason,
            model=self.name,
            started_at=row.started_at,
            finished_at=max(row.started_at, time.time()),
        )
        row.slot.hold(np.array(ids[:-1], np.int64))  # the last token was sampled, not fed
        self.counts.finished += 1
        self._leave(row)
        row.settle(result)

    def _leave(self, row: Row) -> None:
        if row in self._rows:
            self._rows.remove(row)
            self._batch = None
        if row.slot is not None:
            row.slot.row = None
            row.slot = None

    def _fail(self, row: Row, error: Exception) -> None:
        self.counts.failed += 1
        self._leave(row)
        row.settle(error)

    def _fail_all(self, rows: list[Row], error: Exception) -> None:
        """Fail rows and forget what their slots hold: it may be half written."""
        for row in rows:
            if row.slot is not None:
                row.slot.hold(row.prompt[:0])
            self._fail(
                row,
                error
                if isinstance(error, BoundaryError)
                else ModelError(
                    f"{type(error).__name__} in the engine of {self.name}: {error}",
                    fix="If it is memory, lower max_slots or max_context.",
                    code="engine",
                    phase="sample",
                ),
            )

    # --------------------------------------------------------------------------------------- state, weights

    def pause(self) -> None:
        """Running to paused; refused from any other state."""
        self._go(EngineState.PAUSED)
        self.counts.pauses += 1

    def resume(self) -> None:
        """Paused to running; refused from any other state."""
        self._go(EngineState.RUNNING)
        self.counts.resumes += 1

    def _go(self, state: EngineState) -> None:
        self.state = moved(self.state, state)

    def update(self, change: Callable[[], None], version: int) -> None:
        """Change the weights, stamp what follows with `version`, recompute the rows in flight.

        Whatever happens, the engine is afterwards in the state it was in, pauses equal resumes if it was
        running, and either everything is new or the old weights and version stand.
        """
        if self.version is not None and version <= self.version:
            raise refused(
                "version",
                f"version {version} is not above the present {self.version}.",
                "Publish with the next version number.",
            )
        running = self.state is EngineState.RUNNING
        if running:
            self.pause()
        self._go(EngineState.UPDATING)
        try:
            self._change(change, version)
        finally:
            self._go(EngineState.PAUSED)
            if running:
                self.resume()
        self.version = version
        self.counts.updates += 1
        self._recompute(version)

    def _change(self, change: Callable[[], None], version: int) -> None:
        with torch.no_grad():
            before = [parameter.detach().clone() for parameter in self._model.parameters()]
            try:
                change()
                for name, parameter in self._model.named_parameters():
                    if not bool(torch.isfinite(parameter).all()):
                        raise ModelError(
                            f"weights of version {version} are not finite in {name}; the old weights stay.",
                            fix="Look at the learner's last step.",
                            code="update",
                            phase="update",
                            retryable=False,
                        )
            except BaseException:
                for parameter, old in zip(self._model.parameters(), before, strict=True):
                    parameter.copy_(old)
                raise

    @torch.inference_mode()
    def _recompute(self, version: int) -> None:
        for slot in self._slots:
            slot.hold(slot.ids[:0])
        for row in self._rows:
            row.versions.append((row.generated, version))
        spans = [Span(row, 0, row.length - 1) for row in self._rows]
        for part in self._parts(spans):
            try:
                self._prefill(part)
                for span in part:
                    assert span.row.slot is not None
                    span.row.slot.hold(span.row.prompt)
            except Exception as error:  # the boundary: these rows fail, the update stands
                self._fail_all([span.row for span in part], error)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The model's parameters by every name they have (tied ones under each)."""
        return dict(self._model.named_parameters(remove_duplicate=False))

    # ------------------------------------------------------------------------------------------------ start

    def _idle_slots(self, wanted: int | None) -> int:
        """How many idle slots there may be. Refuses rows that alone could outgrow the memory."""
        row_bytes = self._store.token_bytes * self.max_context
        total = _memory_bytes(self._device)
        if self._max_rows * row_bytes > total:
            raise ConfigError(
                f"{self._max_rows} rows of {self.max_context} tokens may need"
                f" {self._max_rows * row_bytes / 2**30:.1f} GiB of keys and values,"
                f" {self._device} has {total / 2**30:.1f}.",
                fix="Lower max_slots or max_context.",
            )
        if wanted is not None:
            return wanted
        fit = int(MEMORY_SHARE * total / row_bytes) - self._max_rows
        return max(0, min(self._max_rows, fit))

    @torch.inference_mode()
    def _probe(self) -> None:
        """Run a few tokens plainly and again through the slots: refuse attention that slots do not carry."""
        kind = type(self._model).__name__
        count = min(PROBE_TOKENS, self.max_context)
        ids = torch.arange(count, device=self._device)[None] % self._vocab
        plain = torch.log_softmax(self._model(input_ids=ids, use_cache=False).logits[0].float(), -1)
        exchange = getattr(self._model, "set_attn_implementation", None)
        if exchange is None:
            raise ConfigError(
                f"{kind} has no exchangeable attention.",
                fix="Use a causal LM that supports attention backends, or serve it with vLLM.",
            )
        exchange(SLOT_ATTENTION)
        self._store.reserve(slots=2, capacity=count)
        slot_A = torch.tensor([1], device=self._device)
        worst = 0.0
        try:
            for at in range(count):
                position_A = torch.tensor([at], device=self._device)
                logits = self._forward(
                    ids[:, at : at + 1],
                    position_A[:, None],
                    mask=self._no_mask,
                    view=DecodeView(self._store, slot_A, position_A),
                    runs=plan_runs([1], [at + 1], position_A, dtype=self._dtype),
                )
                off = torch.log_softmax(logits[0].float(), -1) - plain[at]
                worst = max(worst, float(off.abs().max()))
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{kind} does not run with slot attention: {error}", fix="Serve the model with vLLM."
            ) from error
        if not worst < PROBE_TOLERANCE.get(self._dtype, PROBE_TOLERANCE_COARSE):
            raise ConfigError(
                f"{kind} through slots is off its plain forward by {worst:.3g} in log-prob.",
                fix="Its attention is not plain causal attention; serve the model with vLLM.",
            )


# ------------------------------------------------------------------------------------------------------
# pieces


def common_prefix(a: IdArray, b: IdArray) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def head_of(ids: IdArray) -> bytes:
    """The first `SHARE_TOKENS` ids as a key, empty when there are fewer."""
    return ids[:SHARE_TOKENS].tobytes() if len(ids) >= SHARE_TOKENS else b""


def _resized(old: Tensor, rows: int, columns: int) -> Tensor:
    new = old.new_zeros(rows, columns)
    new[: old.shape[0], : old.shape[1]] = old
    return new


def _memory_bytes(device: torch.device) -> int:
    """All memory of the device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _refuse_windows(config: Any, max_context: int) -> None:
    window: int | None = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds and (window is None or window < max_context):
        raise ConfigError(
            f"the model has layers of kind {', '.join(sorted(kinds))}.",
            fix="Slots hold full attention only: lower max_context to the window, or use vLLM.",
        )
    if getattr(config, "layer_types", None) or not getattr(config, "use_sliding_window", True):
        return
    if window is not None and window < max_context:
        raise ConfigError(
            f"the model attends to {window} tokens, the context is {max_context}.",
            fix=f"Set max_context to at most {window}, or use vLLM.",
        )
