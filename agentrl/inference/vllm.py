"""vLLM servers as the policy: any number of replicas behind one sampler, token ids in, evidence out.

`VllmSampler.sample` sends a prompt to the replica that likely has its prefix cached (that of the session,
else of the group) unless another has much less to do, and turns the answer into a `SampleResult`. `publish`
puts new weights into all running replicas: check, pause, load, label, resume, compare with what the learner
computed.

Invariants
- One request is one result: a try that failed or whose tokens can not be vouched for leaves nothing behind.
- A token is attributed to the weights that the server says sampled it, and only to weights published here (or
  to those that all replicas had at the start). What a restarted server samples from old weights is thrown
  away, and the server gets the present weights before it is used again.
- Pauses equal resumes after every publication, also one that failed; a failed one leaves the old weights and
  version everywhere.
- Cancelling a task closes its connection, which ends the generation in the server.

It reads no weights and starts no server. The folder of a version must be visible to the servers under the
same path. Measured on vLLM 0.32; its development endpoints (`VLLM_SERVER_DEV_MODE=1`) are needed to
publish, not to sample.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.errors import ConfigError, ModelError
from agentrl.inference import vllm_wire as wire
from agentrl.inference.connections import (
    ConnectionLost,
    Connections,
    IdleClosed,
    NotConnected,
    Reply,
    TransportError,
)
from agentrl.inference.resume import sample_whole
from agentrl.inference.sampler import SampleRequest, SampleResult
from agentrl.inference.states import EngineState, moved, refused
from agentrl.types import LogProbKind

InFlight = Literal["keep", "abort", "wait"]
"""What a publication does to requests in flight. keep: they go on under the new weights, keys and values
computed anew. abort: they end as they stand and are taken up again after it. wait: they finish first on the
old."""

LOAD_SLACK = 8
"""How many more requests a replica may have than the least loaded and still keep its sessions."""
HOMES = 8192
"""Sessions and groups whose replica is remembered."""
MAX_LOST = 4
"""Tries of one request that reached a server and got no usable answer before it is given up: more would let
one request kill one server after the other."""
CONNECT_S = 10.0
CONTROL_S = 60.0
"""Small requests beside sampling."""
REVIVE_S = (0.2, 15.0)
"""First and longest time between two looks at a replica that failed."""
KEEP_ALIVE_S = 2.0
"""Less than the server keeps an idle connection, so that requests are seldom sent into one that closes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Ids and what the learner computes for them (`log_probs[i]` of `ids[i]`, the first None): a
    publication whose servers say something else by more than `tolerance` on average is taken back."""

    ids: tuple[int, ...]
    log_probs: tuple[float | None, ...]
    tolerance: float


@dataclass(slots=True)
class VllmCounts:
    """What the sampler did since it started. Tokens are counted when they are handed over, so retries count
    once."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    tries: int = 0
    """Requests sent to servers, retries and resumed ones included."""
    generated_tokens: int = 0
    prompt_tokens: int = 0
    pauses: int = 0
    resumes: int = 0
    updates: int = 0
    closed_idle: int = 0
    """Kept connections that a server had closed: what was sent into them was sent again, and the server is
    still used."""


@dataclass(slots=True, eq=False)
class Replica:
    """One server. `label` is that of its weights; `root` what it was started with."""

    url: str
    model: str = ""
    root: str = ""
    context: int = 0
    label: str = wire.UNVERSIONED
    kind: LogProbKind = LogProbKind.RAW
    load: int = 0
    up: bool = False
    met: bool = False
    why_down: str = "not asked yet"
    sent: int = 0
    """Requests sent to it, retries included."""


class _Lost(Exception):
    """A try came to nothing; another may work."""


def group_of(session: str) -> str:
    """The group of a session named `GROUP.MEMBER.TRY`, as `harness.rollout` names them; any other is its
    own."""
    parts = session.rsplit(".", 2)
    return parts[0] if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit() else session


class VllmSampler:
    """See the module. Made by `connect`; used in the event loop in which it was made."""

    def __init__(self, urls: Sequence[str], *, key: str | None, seeds: bool) -> None:
        self._replicas = [Replica(url=url.rstrip("/")) for url in urls]
        self._seeds = seeds
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = Connections(headers=headers, connect_s=CONNECT_S, keep_s=KEEP_ALIVE_S)
        self._homes: dict[str, Replica] = {}
        self._labels: dict[str, int] | None = None
        self._version: int | None = None
        self._location: str | None = None
        self._label = wire.UNVERSIONED
        self._published: int | None = None
        self._state = EngineState.RUNNING
        self._update = asyncio.Lock()
        self._settled = asyncio.Event()
        self._settled.set()
        self._changed = asyncio.Event()
        self._reviving: set[asyncio.Task[None]] = set()
        self._sampling: set[asyncio.Task[Any]] = set()
        self._turn = itertools.count()
        self.counts = VllmCounts()

    @classmethod
    async def connect(
        cls,
        urls: Sequence[str],
        *,
        key: str | None = None,
        seeds: bool = False,
        deadline_s: float = 300.0,
    ) -> VllmSampler:
        """Wait for all servers and ask each what it serves.

        Args:
            urls: base URLs, without `/v1`.
            key: bearer token of the servers.
            seeds: send the seeds of requests. Only for servers with `--no-enable-chunked-prefill`: on
                others one seeded request can end the engine, so they are refused here.
            deadline_s: how long servers may take to come up.

        Raises:
            ConfigError: no URL, different models, a server that refuses ids.
            ModelError: `deadline`, naming the server that is waited for and why.
        """
        if not urls:
            raise ConfigError("A vLLM sampler without a server.", fix="Give at least one URL.")
        made = cls(urls, key=key, seeds=seeds)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.gather(*(made._await_up(replica) for replica in made._replicas))
        except TimeoutError as error:
            await made.close()
            late = next(r for r in made._replicas if not r.up)
            raise ModelError(
                f"waiting for {late.url} since {deadline_s:.1f} s: {late.why_down}.",
                fix="Start the server, or look at its log.",
                code="deadline",
                phase="connect",
            ) from error
        except BaseException:
            await made.close()
            raise
        if len({r.model for r in made._replicas}) > 1:
            await made.close()
            names = ", ".join(sorted({r.model for r in made._replicas}))
            raise ConfigError(
                f"The servers serve different models: {names}.", fix="Give replicas of one model."
            )
        labels = {r.label for r in made._replicas}
        if len(labels) == 1:
            made._label = labels.pop()
            made._version = wire.version_of(made._label)
            if made._version is not None:
                made._labels = {made._label: made._version}
        return made

    @property
    def model(self) -> str:
        return self._replicas[0].model

    @property
    def policy_version(self) -> int | None:
        return self._version

    @property
    def max_context(self) -> int:
        return min(r.context for r in self._replicas)

    @property
    def log_prob_kind(self) -> LogProbKind:
        """Of sampled (not greedy) tokens: processed only if every replica says so."""
        kinds = {r.kind for r in self._replicas}
        return LogProbKind.PROCESSED if kinds == {LogProbKind.PROCESSED} else LogProbKind.RAW

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def active(self) -> int:
        """Requests that are in flight right now."""
        return sum(r.load for r in self._replicas)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return tuple(self._replicas)

    # ------------------------------------------------------------------------------------------- sampling

    async def sample(self, request: SampleRequest) -> SampleResult:
        """One generation, in as many tries as it takes until the deadline.

        Raises:
            ModelError: `empty_prompt`, `context`, `seed`, `refused` (the server found fault with the
                request), `deadline`, `server` (tries that reached servers came to nothing), `closed`, and
                what `vllm_wire.result` finds wrong with an answer.
        """
        self._refuse(request)
        self.counts.requests += 1
        notes: list[str] = []
        task = asyncio.current_task()
        assert task is not None
        self._sampling.add(task)
        try:
            async with asyncio.timeout(request.deadline_s):
                result = await sample_whole(
                    lambda leg: self._leg(leg, notes), request, context=self.max_context
                )
        except TimeoutError as error:
            self.counts.failed += 1
            seen = f" Before that: {notes[-1]}." if notes else ""
            raise ModelError(
                f"waiting for {self.model} since {request.deadline_s:.1f} s: {self._where()}.{seen}",
                fix="Raise the deadline, lower max_tokens, or look at the servers.",
                code="deadline",
                phase="sample",
                evidence={"request": request.id, "tries": len(notes) + 1},
            ) from error
        except asyncio.CancelledError:
            self.counts.cancelled += 1
            if self._state is EngineState.CLOSED:
                task.uncancel()  # by `close`, not by whoever waits
                raise refused("closed", f"{self.model} was closed.", "Start a new sampler.") from None
            raise
        except ModelError:
            self.counts.failed += 1
            raise
        finally:
            self._sampling.discard(task)
        self.counts.finished += 1
        self.counts.generated_tokens += len(result.token_ids)
        self.counts.prompt_tokens += len(result.prompt_token_ids)
        return result

    async def score(self, ids: Sequence[int], *, deadline_s: float = 120.0) -> tuple[float | None, ...]:
        """Log-prob of each id given those before it at temperature 1, by the present weights; the first is
        None.

        For teachers and judges of tokens. Raises `ModelError` as `sample` does.
        """
        up = [r for r in self._replicas if r.up]
        if not up:
            raise ModelError(f"no server is up: {self._where()}.", code="server", phase="sample")
        return await self._score(min(up, key=lambda r: r.load), ids, deadline_s)

    async def _score(
        self, replica: Replica, ids: Sequence[int], deadline_s: float
    ) -> tuple[float | None, ...]:
        fields = {
            "model": replica.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
            "cache_salt": uuid.uuid4().hex,
        }
        answer = await self._control(replica, "/v1/completions", fields, deadline_s=deadline_s)
        return wire.prompt_log_probs(answer, ids)

    async def close(self) -> None:
        """End what is in flight and the connections. The servers go on. Idempotent."""
        if self._state is EngineState.CLOSED:
            return
        self._state = EngineState.CLOSED
        ending = [*self._reviving, *(t for t in self._sampling if t is not asyncio.current_task())]
        for task in ending:
            task.cancel()
        await asyncio.gather(*self._reviving, return_exceptions=True)
        await self._http.close()

    def _refuse(self, request: SampleRequest) -> None:
        if self._state is EngineState.CLOSED:
            raise refused("closed", f"{self.model} is closed.", "Start a new sampler.")
        if not request.prompt_token_ids:
            raise refused("empty_prompt", "a request without prompt tokens.", "Give at least one token.")
        if len(request.prompt_token_ids) >= self.max_context:
            raise refused(
                "context",
                f"a prompt of {len(request.prompt_token_ids)} tokens leaves no room in a context of"
                f" {self.max_context}.",
                "Shorten the history or raise --max-model-len.",
            )
        if request.params.seed is not None and not self._seeds:
            raise refused(
                "seed",
                "a seeded request can end an engine that prefills in chunks.",
                "Send no seed, or start the servers with --no-enable-chunked-prefill and set seeds=True.",
            )

    async def _leg(self, request: SampleRequest, notes: list[str]) -> SampleResult:
        """One uninterrupted generation: tries until one is answered."""
        lost = 0
        while True:
            replica = await self._route(request.session)
            replica.load += 1
            try:
                return await self._one(replica, request, lost=lost)
            except NotConnected as error:
                # Nothing was asked yet: it costs no try.
                notes.append(f"{replica.url}: {_name(error)}")
                self._down(replica, _name(error))
            except (TransportError, _Lost) as error:
                notes.append(f"{replica.url}: {_name(error)}")
                lost += 1
                if lost >= MAX_LOST:
                    raise ModelError(
                        f"{request.id}: {lost} tries came to nothing, the last at {notes[-1]}.",
                        fix="Look at the servers' logs; one request may be ending them.",
                        code="server",
                        phase="sample",
                        evidence={"request": request.id, "tries": lost},
                    ) from error
                if isinstance(error, TransportError):
                    self._down(replica, _name(error))
                await asyncio.sleep(random.uniform(0.5, 1.0) * min(5.0, 0.1 * 2**lost))
            finally:
                replica.load -= 1
                self._tell()

    async def _one(self, replica: Replica, request: SampleRequest, *, lost: int) -> SampleResult:
        """One try at one replica, after `lost` ones that came to nothing."""

        def fields() -> dict[str, Any]:
            replica.sent += 1
            self.counts.tries += 1
            return wire.body(
                request,
                model=replica.model,
                request_id=f"{request.id}~{uuid.uuid4().hex[:12]}",
                salt=None if self._labels is None else self._label,
            )

        started_at = time.time()
        response = await self._asked(replica.url + wire.GENERATE, fields, again=not lost)
        if response.status in wire.RETRIED_STATUS:
            said = f"{response.status} {_message(response)}"
            if response.status >= 500 and response.status != 503:
                self._down(replica, said)
            raise _Lost(said)
        if response.status != 200:
            raise _refused_by(replica, request, response)
        try:
            answer = _json(response)
        except ModelError as error:
            raise _Lost(error.message) from error
        await self._settled.wait()  # while weights change it is not known yet which ones are good
        try:
            return wire.result(
                request,
                answer,
                model=replica.model,
                server_kind=replica.kind,
                labels=self._labels,
                started_at=started_at,
                finished_at=time.time(),
            )
        except ModelError as error:
            if error.code != "foreign_version":
                raise
            self._down(replica, error.message)
            raise _Lost(error.message) from error

    async def _asked(self, url: str, fields: Callable[[], dict[str, Any]], *, again: bool = True) -> Reply:
        """An answer; where the server had closed a kept connection, it is asked `again` over a new one.
        Raises `TransportError`.

        Everything that a server is asked here may be asked twice: a generation of which nothing came back was
        nobody's (and gets an id of its own, since the first may still run), and pausing, loading and
        labelling again changes nothing. Where the server takes no new connection it may have died of the
        request, which is then one that reached it.
        """
        try:
            return await self._http.post(url, fields())
        except IdleClosed as closed:
            if not again:
                raise
            self.counts.closed_idle += 1
            try:
                return await self._http.post(url, fields(), fresh=True)
            except NotConnected as error:
                raise ConnectionLost(f"{closed}, and then {error}") from error

    # -------------------------------------------------------------------------------------------- routing

    async def _route(self, session: str) -> Replica:
        """The replica for the next call of a session; waits while none is up."""
        return self._choose(await self._some_up(), session)

    async def _some_up(self) -> list[Replica]:
        """The replicas that can be used; waits while there is none."""
        while True:
            self._changed.clear()
            ready = [r for r in self._replicas if r.up]
            if ready:
                return ready
            await self._changed.wait()

    def _choose(self, ready: Sequence[Replica], session: str) -> Replica:
        least = min(r.load for r in ready)
        group = group_of(session)
        chosen: Replica | None = None
        for name in (session, group):
            home = self._homes.get(name)
            if home is not None and home.up and home.load <= least + LOAD_SLACK:
                chosen = home
                break
        if chosen is None:
            turn = next(self._turn)
            idle = [r for r in ready if r.load == least]
            chosen = idle[turn % len(idle)]
            self._homes[group] = chosen
        self._homes.pop(session, None)
        self._homes[session] = chosen
        while len(self._homes) > HOMES:
            self._homes.pop(next(iter(self._homes)))
        return chosen

    def _where(self) -> str:
        parts = [
            f"{r.url} {'up' if r.up else f'down ({r.why_down})'}, {r.load} requests" for r in self._replicas
        ]
        return "; ".join(parts) + ("" if self._state is EngineState.RUNNING else f"; {self._state}")

    def _none_up(self, what: str) -> ModelError:
        return ModelError(
            f"{what}: no server can be reached: {self._where()}.",
            fix="Start them; publishing again is safe.",
            code="update",
            phase="update",
        )

    def _tell(self) -> None:
        self._changed.set()

    def _down(self, replica: Replica, why: str) -> None:
        """Stop using a replica until it answers again and has the present weights."""
        if not replica.up or self._state is EngineState.CLOSED:
            return
        log.warning("%s is not used for now: %s", replica.url, why)
        replica.up, replica.why_down = False, why
        task = asyncio.create_task(self._revive(replica))
        self._reviving.add(task)
        task.add_done_callback(self._reviving.discard)

    async def _revive(self, replica: Replica) -> None:
        """Look at a replica again and again; whatever keeps it away stays visible in `why_down`."""
        await asyncio.sleep(REVIVE_S[0])
        try:
            await self._await_up(replica)
        except ConfigError as error:
            replica.why_down = error.message
            log.error("%s can not be used any more: %s", replica.url, error)

    async def _await_up(self, replica: Replica) -> None:
        delay_s = REVIVE_S[0]
        while True:
            try:
                await self._greet(replica)
                self._tell()
                return
            except (TransportError, ModelError) as error:
                replica.why_down = _name(error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, REVIVE_S[1])

    async def _greet(self, replica: Replica) -> None:
        """Ask a server what it is, give it the present weights if it has others, and use it."""
        response = await self._http.get(replica.url + "/v1/models", deadline_s=CONTROL_S)
        if response.status in (401, 403):
            raise ConfigError(
                f"{replica.url} refuses the key: {_message(response)}", fix="Set AGENTRL_SERVER_KEY."
            )
        if response.status != 200:
            raise _server_error(replica, "/v1/models", response)
        try:
            served = _json(response)["data"][0]
            replica.model, replica.root = served["id"], served.get("root") or ""
            replica.context = int(served["max_model_len"])
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"{replica.url} does not answer as vLLM does: no {error} in /v1/models.",
                fix="Give the URL of a vLLM server; other endpoints can be a frozen agent only.",
            ) from error
        async with self._update:
            if self._state is EngineState.RUNNING and await self._left_paused(replica):
                if await self._label_of(replica) == wire.LOADING:  # perhaps without weights
                    await self._bring_current(replica)
                else:
                    await self._control(replica, "/resume", None)
        if not replica.met or await self._label_of(replica) != replica.label:  # perhaps another process
            replica.kind = await self._kind_of(replica)
        replica.met = True
        async with self._update:  # no publication between what follows
            replica.label = await self._label_of(replica)
            if self._location is not None and replica.label != self._label:
                await self._bring_current(replica)
            if self._state is EngineState.PAUSED:
                await self._control(replica, "/pause?mode=keep", None)
            replica.up = True

    async def _left_paused(self, replica: Replica) -> bool:
        """Whether somebody who is gone paused it. Servers without development endpoints can not be paused."""
        response = await self._http.get(replica.url + "/is_paused", deadline_s=CONTROL_S)
        return response.status == 200 and bool(_json(response).get("is_paused"))

    async def _label_of(self, replica: Replica) -> str:
        """Label of a server's weights; a server without development endpoints has none."""
        response = await self._http.get(replica.url + "/weight_info", deadline_s=CONTROL_S)
        if response.status != 200:
            return wire.UNVERSIONED
        return str(_json(response).get("weight_version", wire.UNVERSIONED))

    async def _kind_of(self, replica: Replica) -> LogProbKind:
        """Whether log-probs are of the distribution that is sampled: found out by halving the temperature,
        which doubles the distance between any two of them, or does not."""
        if self._state is not EngineState.RUNNING:
            raise ModelError(f"the servers are {self._state}.", code="state", phase="connect")
        gaps: list[dict[int, float]] = []
        for temperature in (1.0, 0.5):
            fields = {
                "model": replica.model,
                "token_ids": [1, 2, 3],
                "sampling_params": {"max_tokens": 1, "temperature": temperature, "logprobs": 5},
                "return_token_ids": True,
            }
            try:
                answer = await self._control(replica, wire.GENERATE, fields)
                listed = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            except ModelError as error:
                if error.code == "refused":
                    raise ConfigError(
                        f"{replica.url} does not take token ids: {error.message}",
                        fix="Start vLLM with --enable-scale-out.",
                    ) from error
                raise
            except (KeyError, IndexError, TypeError) as error:
                raise ConfigError(
                    f"{replica.url} does not answer as vLLM does: no {error} in a generation.",
                    fix="Use vLLM 0.32 or later.",
                ) from error
            gaps.append({entry["token_id"]: entry["logprob"] for entry in listed})
        both = sorted(gaps[0].keys() & gaps[1].keys(), key=lambda i: gaps[0][i])
        if len(both) < 2:
            raise ModelError(f"{replica.url} lists no two common log-probs.", code="probe", phase="connect")
        low, high = both[0], both[-1]
        ratio = (gaps[1][high] - gaps[1][low]) / (gaps[0][high] - gaps[0][low])
        return LogProbKind.PROCESSED if ratio > 1.5 else LogProbKind.RAW

    # ------------------------------------------------------------------------------------- state, weights

    async def pause(self, in_flight: InFlight = "keep", *, deadline_s: float = 600.0) -> None:
        """Stop computing everywhere. Requests wait in the servers. Refused unless running."""
        async with self._update:
            await self._pause([r for r in self._replicas if r.up], in_flight, deadline_s)

    async def resume(self, *, deadline_s: float = CONTROL_S) -> None:
        """Go on. Refused unless paused."""
        async with self._update:
            await self._resume([r for r in self._replicas if r.up], deadline_s)

    async def publish(
        self,
        location: str,
        version: int,
        *,
        content_hash: str = "",
        in_flight: InFlight = "keep",
        probe: Probe | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        """Put the weights at `location` into every replica and stamp what follows with `version`.

        Everything is checked before anything is touched. Afterwards the servers are in the state they were in
        (running, or paused). A replica that can not be reached is left out and gets the weights when it is
        back.

        Args:
            location: folder or file of safetensors, under a path that the servers see.
            version: above the last one published here.
            content_hash: of the version's record; part of the label, so that equal numbers of different
                runs are told apart.
            in_flight: what happens to requests in flight.
            probe: compared after loading; needs running servers.
            deadline_s: of each step.

        Raises:
            ModelError: `version`, `state`, `update` (refused or failed; the old weights stand), `sync` (the
                probe differs; the old weights stand), `deadline`.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self._some_up()
        except TimeoutError as error:
            raise self._none_up(f"version {version}") from error
        async with self._update:
            if self._published is not None and version <= self._published:
                raise refused(
                    "version",
                    f"version {version} is not above the present {self._published}.",
                    "Publish with the next version number.",
                )
            there = [r for r in self._replicas if r.up]
            if not there:
                raise self._none_up(f"version {version}")
            there = await self._all(
                there, "check", lambda r: self._weights(r, "agentrl_check_weights", location, deadline_s)
            )
            label = wire.label_of(version, content_hash)
            running = self._state is EngineState.RUNNING
            self._settled.clear()
            try:
                async with self._updating(there, in_flight, deadline_s) as there:
                    before = {r: r.label for r in there}
                    try:
                        await self._all(there, "load", lambda r: self._load(r, location, label, deadline_s))
                    except BaseException:
                        await self._take_back(before, deadline_s)
                        raise
                if probe is not None and running:
                    try:
                        await self._all(there, "probe", lambda r: self._compare(r, probe, version))
                    except BaseException:
                        async with self._updating(there, "keep", deadline_s):
                            await self._take_back(before, deadline_s)
                        raise
                self._labels = {**(self._labels or {}), label: version}
                self._label, self._version, self._location = label, version, location
                self._published = version
                self.counts.updates += 1
            finally:
                self._settled.set()

    @asynccontextmanager
    async def _updating(
        self, replicas: Sequence[Replica], in_flight: InFlight, deadline_s: float
    ) -> AsyncIterator[list[Replica]]:
        """Paused while the block runs, then as before. A replica that lost its weights stays paused: a step
        without weights would end its engine."""
        running = self._state is EngineState.RUNNING
        there = await self._pause(replicas, in_flight, deadline_s) if running else list(replicas)
        self._state = moved(self._state, EngineState.UPDATING)
        try:
            yield there
        finally:
            self._state = moved(self._state, EngineState.PAUSED)
            if running:
                await self._resume([r for r in there if r.label != wire.LOADING], CONTROL_S)

    async def _pause(
        self, replicas: Sequence[Replica], in_flight: InFlight, deadline_s: float
    ) -> list[Replica]:
        """Pause replicas, or none of them; returns those that could be reached."""
        state = moved(self._state, EngineState.PAUSED)
        path = f"/pause?mode={in_flight}"
        try:
            paused = await self._all(
                replicas, "pause", lambda r: self._control(r, path, None, deadline_s=deadline_s)
            )
        except BaseException:
            await self._all(replicas, "resume", lambda r: self._control(r, "/resume", None))
            raise
        self._state = state
        self.counts.pauses += 1
        return paused

    async def _resume(self, replicas: Sequence[Replica], deadline_s: float) -> None:
        self._state = moved(self._state, EngineState.RUNNING)
        self.counts.resumes += 1
        await self._all(
            replicas, "resume", lambda r: self._control(r, "/resume", None, deadline_s=deadline_s)
        )

    async def _take_back(self, labels: dict[Replica, str], deadline_s: float) -> None:
        """The old weights into every replica that does not have them any more; one where that fails is not
        used until it does."""
        for replica, label in labels.items():
            if replica.label == label:
                continue
            try:
                await self._load(replica, self._location or replica.root, label, deadline_s)
            except (ModelError, TransportError) as error:
                self._down(replica, f"its weights are lost: {_name(error)}")

    async def _bring_current(self, replica: Replica) -> None:
        """The present weights into a server without them. If that fails it stays paused."""
        await self._control(replica, "/pause?mode=keep", None)
        await self._load(replica, self._location or replica.root, self._label, CONTROL_S)
        await self._control(replica, "/resume", None)

    async def _load(self, replica: Replica, location: str, label: str, deadline_s: float) -> None:
        replica.label = wire.LOADING
        await self._control(replica, "/update_weight_version", {"new_version": wire.LOADING})
        await self._weights(replica, "agentrl_load_weights", location, deadline_s)
        await self._control(replica, "/update_weight_version", {"new_version": label})
        replica.label = label

    async def _weights(self, replica: Replica, method: str, location: str, deadline_s: float) -> None:
        await self._control(
            replica, "/collective_rpc", {"method": method, "args": [location]}, deadline_s=deadline_s
        )

    async def _compare(self, replica: Replica, probe: Probe, version: int) -> None:
        """Refuse weights that score the probe otherwise than the learner does."""
        found = await self._score(replica, probe.ids, CONTROL_S)
        pairs = zip(found, probe.log_probs, strict=True)
        off = [abs(a - b) for a, b in pairs if a is not None and b is not None]
        mean = sum(off) / max(1, len(off))
        if not mean <= probe.tolerance:
            raise ModelError(
                f"version {version} at {replica.url} is off the learner by {mean:.4f} per token"
                f" (bound {probe.tolerance}); the old weights stay.",
                fix="Compare dtypes, and look for weights that the server does not reload (a tied head).",
                code="sync",
                phase="update",
                retryable=False,
            )

    async def _all(
        self, replicas: Sequence[Replica], what: str, do: Callable[[Replica], Awaitable[Any]]
    ) -> list[Replica]:
        """Do something on all replicas at once; returns those that could be reached, at least one. Another
        goes down, and is brought up to date when it is back."""
        outcomes = await asyncio.gather(*(do(r) for r in replicas), return_exceptions=True)
        reached: list[Replica] = []
        failed: BaseException | None = None
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, TransportError):
                self._down(replica, f"{what}: {_name(outcome)}")
            elif isinstance(outcome, BaseException):
                failed = failed or outcome
            else:
                reached.append(replica)
        if failed is not None:
            raise failed
        if replicas and not reached:
            raise self._none_up(what)
        return reached

    async def _control(
        self,
        replica: Replica,
        path: str,
        fields: dict[str, Any] | None,
        *,
        deadline_s: float = CONTROL_S,
    ) -> dict[str, Any]:
        """A small request. Raises `TransportError`, or `ModelError`: `refused`, `update`,
        `deadline`."""
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._asked(replica.url + path, lambda: fields or {})
        except TimeoutError as error:
            raise ModelError(
                f"waiting for {replica.url}{path} since {deadline_s:.0f} s.",
                fix="Look at the server's log.",
                code="deadline",
                phase="update",
            ) from error
        if response.status != 200:
            raise _server_error(replica, path, response)
        return _json(response)


# --------------------------------------------------------------------------------------------------- pieces


def _json(response: Reply) -> dict[str, Any]:
    """The object in an answer; an empty body is an empty object."""
    if not response.content:
        return {}
    try:
        found = json.loads(response.content)
    except ValueError as error:
        raise ModelError(
            f"{response.url} answered {len(response.content)} bytes that are no JSON.",
            fix="Look for a proxy in front of the server.",
            code="answer",
            phase="sample",
        ) from error
    return found if isinstance(found, dict) else {"value": found}


def _message(response: Reply) -> str:
    """What a server says about an error, in one line."""
    try:
        found = json.loads(response.content)
    except ValueError:
        return response.text[:200].replace("\n", " ")
    error = found.get("error", found) if isinstance(found, dict) else found
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300].replace("\n", " ")


def _name(error: Exception) -> str:
    text = str(error)
    return text if isinstance(error, _Lost | ModelError) else f"{type(error).__name__} {text}".strip()


def _server_error(replica: Replica, path: str, response: Reply) -> ModelError:
    client = 400 <= response.status < 500
    missing = "Start vLLM with VLLM_SERVER_DEV_MODE=1, --enable-scale-out and the worker extension."
    return ModelError(
        f"{replica.url}{path} answered {response.status}: {_message(response)}",
        fix=missing if client else "Look at the server's log.",
        code="refused" if client else "update",
        phase="update",
        retryable=not client,
    )


def _refused_by(replica: Replica, request: SampleRequest, response: Reply) -> ModelError:
    return ModelError(
        f"{request.id}: {replica.url} refused it with {response.status}: {_message(response)}",
        fix="Use the tokenizer of the model that is served, and vLLM with --enable-scale-out.",
        code="refused",
        phase="sample",
        retryable=False,
        evidence={"request": request.id, "status": response.status},
    )
