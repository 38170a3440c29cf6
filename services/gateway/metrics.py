"""What happened, as Prometheus metrics. Counted as it happens; nothing here decides anything."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from agentrl.types import Fault
from envs.sandbox.warm import PoolState
from harness.gateway.wire import Limited, LimiterView
from services.gateway.states import State

RECENT = 200
MOST_CODES = 200
"""Of faults, as labels: callers make up codes of their own, and every label is kept for ever."""
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """One registry per gateway, so that several may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._states = Gauge("agentrl_sessions", "Sessions by state.", ["state"], registry=self.registry)
        self._ended = Counter(
            "agentrl_sessions_ended",
            "Terminal records by state and by the owner and code of the fault.",
            ["state", "owner", "code"],
            registry=self.registry,
        )
        self._codes: set[str] = set()
        self._adopted = Counter(
            "agentrl_sessions_adopted",
            "Sessions of an earlier epoch that went on after a restart.",
            registry=self.registry,
        )
        self._masked = Counter(
            "agentrl_sessions_masked",
            "Sessions that ended without a score by no doing of the policy, by task.",
            ["task"],
            registry=self.registry,
        )
        self._masked_rate = Gauge(
            "agentrl_masked_rate",
            f"Share of those among the last {RECENT} that ended. A policy must not learn to get there.",
            registry=self.registry,
        )
        self._recent: deque[bool] = deque(maxlen=RECENT)
        self._queue = Histogram(
            "agentrl_queue_seconds", "Waiting for a slot.", buckets=_SECONDS, registry=self.registry
        )
        self._ran = Histogram(
            "agentrl_operation_seconds",
            "Operations in sessions, without waiting for a permit.",
            ["what"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._permit = Histogram(
            "agentrl_permit_seconds", "Waiting for a run permit.", buckets=_SECONDS, registry=self.registry
        )
        self._held = Gauge(
            "agentrl_in_use", "What is held of a resource.", ["resource"], registry=self.registry
        )
        self._limits = Gauge(
            "agentrl_limit",
            "How much of an operation is asked of the backend at once.",
            ["operation"],
            registry=self.registry,
        )
        self._limit_waiting = Gauge(
            "agentrl_limit_waiting", "Who waits for a turn.", ["operation"], registry=self.registry
        )
        self._limit_decreased = Gauge(
            "agentrl_limit_decreased",
            "How often the limit fell because the operation got slow or failed.",
            ["operation"],
            registry=self.registry,
        )
        self._limited = Histogram(
            "agentrl_limited_seconds",
            "Waiting for a turn to be prepared, made or removed.",
            ["operation"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._warm = Gauge(
            "agentrl_warm_sandboxes",
            "Sandboxes started ahead: the most there may be, those ready, those being started.",
            ["what"],
            registry=self.registry,
        )
        self._warm_counts = {
            name: Counter(f"agentrl_warm_{name}", about, registry=self.registry)
            for name, about in (
                ("hit", "Asked for and ready."),
                ("miss", "Asked for and not ready: made then."),
                ("discarded", "Ended unused: dead, too old, or no longer asked for."),
                ("failed", "Starts ahead that failed."),
            )
        }
        self._warm_told = dict.fromkeys(self._warm_counts, 0)
        self._leaked = Gauge(
            "agentrl_leaked_sandboxes", "Sandboxes that did not close in time.", registry=self.registry
        )

    def moved(self, before: State | None, after: State) -> None:
        if before is not None:
            self._states.labels(state=str(before)).dec()
        self._states.labels(state=str(after)).inc()

    def ended(self, state: State, fault: Fault | None, task_id: str) -> None:
        owner, code = ("", "") if fault is None else (fault.owner, self._code(fault.code))
        self._ended.labels(state=str(state), owner=owner, code=code).inc()
        if state is State.CANCELLED:  # its caller did not want it: that says nothing of how attempts end
            return
        masked = fault is not None and not fault.scored
        self._recent.append(masked)
        self._masked_rate.set(sum(self._recent) / len(self._recent))
        if masked:
            self._masked.labels(task=task_id).inc()

    def _code(self, code: str) -> str:
        if code not in self._codes and len(self._codes) >= MOST_CODES:
            return "other"
        self._codes.add(code)
        return code

    def adopted(self) -> None:
        self._adopted.inc()

    def queued(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def ran(self, what: str, seconds: float, queued_s: float) -> None:
        self._ran.labels(what=what).observe(seconds)
        self._permit.observe(queued_s)

    def limited(self, operation: str, seconds: float) -> None:
        self._limited.labels(operation=operation).observe(seconds)

    def pool(self, state: PoolState) -> None:
        """What a pool has now, and has done since it was last told."""
        for what, count in (("size", state.size), ("ready", state.ready), ("making", state.making)):
            self._warm.labels(what=what).set(count)
        told = {"hit": state.hits, "miss": state.misses}
        told |= {"discarded": state.discarded, "failed": state.failed}
        for name, count in told.items():
            self._warm_counts[name].inc(count - self._warm_told[name])
        self._warm_told = told

    def page(self, in_use: dict[str, float], leaked: int, limiters: Mapping[Limited, LimiterView]) -> bytes:
        """The text that Prometheus reads."""
        for operation, view in limiters.items():
            self._limits.labels(operation=operation).set(view.limit)
            self._limit_waiting.labels(operation=operation).set(view.waiting)
            self._limit_decreased.labels(operation=operation).set(view.decreased)
        for resource, amount in in_use.items():
            self._held.labels(resource=resource).set(amount)
        self._leaked.set(leaked)
        return generate_latest(self.registry)
