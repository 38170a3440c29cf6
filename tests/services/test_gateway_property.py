"""Whatever callers do and whatever fails: one end per request, no reward without evidence, nothing left.

A state machine drives a whole gateway through HTTP. Faults strike at random operations of the sandbox; some
are the environment's, some are bugs, some never answer. Time jumps, the gateway is killed and started again.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gateway_given import MemoryBackend, World, until, world
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.errors import AgentRLError, ExecUnknown, SandboxError, SandboxLost
from agentrl.store import Store
from agentrl.types import EvidenceKey, Task, Termination, Verdict, from_json
from harness.gateway import client as calls
from harness.gateway import wire
from services.gateway.states import ENDED, FOLLOWS, State

SLOTS, PERMITS, VERIFY = 3, 2, 1
FAULTS = ("no", "no", "no", "lost", "unknown", "refused", "bug", "slow", "hangs")
PLACES = st.integers(0, 1000)
GIVEN: dict[str, Any] = {}


@pytest.fixture(autouse=True, scope="module")
def given_store(blank: Path, task: Task) -> Iterator[None]:
    GIVEN.update(blank=blank, task=task)
    yield
    GIVEN.clear()


class Faults:
    """What the next operations of sandboxes do; after the list, they work."""

    def __init__(self) -> None:
        self.next: list[str] = []

    async def __call__(self, operation: str, session: str) -> None:
        kind = self.next.pop(0) if self.next else "no"
        await asyncio.sleep(0)
        match kind:
            case "lost":
                raise SandboxLost("Gone.", phase=operation)
            case "unknown":
                raise ExecUnknown("No answer can be trusted.", phase=operation)
            case "refused":
                raise SandboxError("The engine refused.", code="engine", phase=operation)
            case "bug":
                raise ZeroDivisionError("a bug of ours")
            case "slow":
                await asyncio.sleep(0.01)
            case "hangs":
                await asyncio.sleep(3600)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gateway-property-"))
        shutil.copy(GIVEN["blank"], self.folder / "store.db")
        self.store = Store.open(self.folder / "store.db")
        self.task: Task = GIVEN["task"]
        self.runner = asyncio.Runner()
        self.clock = Clock()
        self.faults = Faults()
        self.backends: list[MemoryBackend] = []
        self.stacks: list[AsyncExitStack] = []
        self.asked: list[tuple[str, str]] = []
        """Tenant and client key of every request, in order: the same whatever the timing was."""
        self.keys = 0
        self.here: World = self.runner.run(self.start())

    async def start(self) -> World:
        backend = MemoryBackend(before=self.faults)
        self.backends.append(backend)
        stack = AsyncExitStack()
        self.stacks.append(stack)
        return await stack.enter_async_context(
            world(
                self.store,
                [self.task],
                backend=backend,
                clock=self.clock,
                slots=SLOTS,
                permits=PERMITS,
                verify=VERIFY,
                reap_every_s=0.002,
            )
        )

    def send(self, call: calls.Call[Any], tenant: str = "ada", within_s: float = 0.3) -> Any:
        """Like a caller that may give up and whose errors are its own."""

        async def one() -> Any:
            try:
                async with asyncio.timeout(within_s):
                    return await self.here.clients[tenant].send(call)
            except (AgentRLError, TimeoutError):
                return None

        return self.runner.run(one())

    def found(self, place: int) -> tuple[str, str]:
        """Session id and tenant of one of the requests."""
        tenant, key = self.asked[place % len(self.asked)]
        row = self.store.find_session(tenant, client_key=key)
        return ("s-none" if row is None else row.id), tenant

    @rule(faults=st.lists(st.sampled_from(FAULTS), max_size=12))
    def faults_will_strike(self, faults: list[str]) -> None:
        self.faults.next = faults

    @rule(tenant=st.sampled_from(["ada", "bob"]), group=st.sampled_from([1, 1, 2, 3]))
    def a_group_is_asked_for(self, tenant: str, group: int) -> None:
        self.keys += 1
        for member in range(group):
            key = f"k{self.keys}.{member}"
            self.asked.append((tenant, key))
            call = calls.open_session(
                client_key=key,
                task_id=self.task.id,
                group_id=f"g{self.keys}",
                group_size=group,
                lease_ttl_s=100.0,
            )
            view = self.send(call, tenant)
            again = self.send(call, tenant)
            assert view is None or again is None or again.id == view.id

    @rule(tenant=st.sampled_from(["ada", "bob"]))
    def a_whole_attempt_is_made(self, tenant: str) -> None:
        self.a_group_is_asked_for(tenant, 1)
        one = len(self.asked) - 1
        self.someone_waits(one)
        self.a_command_is_sent_twice_at_once(one, "true")
        self.someone_finalizes(one, Termination.FINISHED)

    @precondition(lambda self: self.asked)
    @rule(place=PLACES)
    def someone_waits(self, place: int) -> None:
        session_id, tenant = self.found(place)
        self.send(calls.session(session_id, wait_s=0.1), tenant)

    @precondition(lambda self: self.asked)
    @rule(place=PLACES, command=st.sampled_from(["true", "sleep 0.01", "sleep 9"]))
    def a_command_is_sent_twice_at_once(self, place: int, command: str) -> None:
        session_id, tenant = self.found(place)
        self.keys += 1
        call = calls.run(session_id, wire.ExecBody(exec_id=f"e{self.keys}", command=command, timeout_s=0.05))

        async def both() -> None:
            client = self.here.clients[tenant]
            done = await asyncio.wait_for(
                asyncio.gather(client.send(call), client.send(call), return_exceptions=True), 1.0
            )
            assert type(done[0]) is type(done[1])
            assert isinstance(done[0], AgentRLError) or done[0] == done[1]

        with suppress(TimeoutError):
            self.runner.run(both())
        for backend in self.backends:
            assert len(set(backend.ran)) == len(backend.ran), "a command ran twice"

    @precondition(lambda self: self.asked)
    @rule()
    def everybody_runs_a_command_at_once(self) -> None:
        self.keys += 1
        body = wire.ExecBody(exec_id=f"e{self.keys}", command="sleep 0.01", timeout_s=1.0)
        sessions = [self.found(place) for place in range(len(self.asked))]

        async def all_of_them() -> None:
            sent = [self.here.clients[tenant].send(calls.run(one, body)) for one, tenant in sessions]
            await asyncio.wait_for(asyncio.gather(*sent, return_exceptions=True), 1.0)

        with suppress(TimeoutError):
            self.runner.run(all_of_them())

    @precondition(lambda self: self.asked)
    @rule(place=PLACES, termination=st.sampled_from([Termination.FINISHED, Termination.CANCELLED]))
    def someone_finalizes(self, place: int, termination: Termination) -> None:
        session_id, tenant = self.found(place)
        call = calls.finalize(session_id, termination=termination, fault=None, deadline_s=5)
        first = self.send(call, tenant)
        second = self.send(call, tenant)
        assert first is None or second is None or first == second

    @precondition(lambda self: self.asked)
    @rule(place=PLACES)
    def someone_deletes(self, place: int) -> None:
        session_id, tenant = self.found(place)
        self.send(calls.delete(session_id), tenant)

    @rule(seconds=st.sampled_from([1.0, 1.0, 1.0, 60.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.runner.run(asyncio.sleep(0.01))

    @rule()
    def the_gateway_is_killed_and_started_again(self) -> None:
        self.here = self.runner.run(self.start())

    @invariant()
    def limits_hold(self) -> None:
        for backend in getattr(self, "backends", ()):
            assert backend.most_live <= SLOTS
            assert backend.most_running <= PERMITS
            assert backend.most_verifying <= VERIFY

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        self.faults.next = []
        self.clock.now += 10_000.0  # every lease has ended

        async def over() -> None:
            last = self.here
            await until(lambda: not self.store.unended_sessions("gateway"), 20)
            await last.quiet(20)
            for ration in (last.gateway.slots, last.gateway.permits, last.gateway.verification):
                await until(lambda ration=ration: not any(ration.in_use.values()) and not ration.waiting())
            for stack in self.stacks:
                await stack.aclose()

        self.runner.run(over())
        self.runner.close()
        for backend in self.backends:
            assert backend.live == set(), "a sandbox was left"
            assert len(set(backend.ran)) == len(backend.ran)
        for tenant, key in self.asked:
            row = self.store.find_session(tenant, client_key=key)
            if row is not None:
                self.has_one_end(row.id)
        self.store.close()
        shutil.rmtree(self.folder)

    def has_one_end(self, session_id: str) -> None:
        row = self.store.session(session_id)
        log = self.store.session_log(session_id)
        path = [State(line.state) for line in log]
        assert path[0] is State.QUEUED
        assert [line.seq for line in log] == list(range(len(log)))
        assert sum(state in ENDED for state in path) == 1
        assert path[-1] in ENDED
        for before, after in pairwise(path):
            assert after in FOLLOWS[before]
        assert row.verdict is not None
        verdict = from_json(Verdict, row.verdict)
        assert (verdict.reward is not None) == (path[-1] is State.DONE)
        if verdict.reward is not None:
            assert {link.key for link in verdict.evidence if link.holds} == set(EvidenceKey)
        else:
            assert verdict.fault is not None
            assert verdict.fault.owner in ("environment", "gateway"), "nothing here was a policy's doing"
            assert (log[-1].owner, log[-1].code) == (verdict.fault.owner, verdict.fault.code)


TestGateway = Machine.TestCase
TestGateway.settings = settings(
    max_examples=10,
    stateful_step_count=14,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
