"""How much a gateway asks of its backend at once: a limit for each kind of work, learned from how long it
takes.

Making sandboxes, removing them, pulling and building images each wait for a turn of their own. Commands wait
for run permits, which are shared out fairly; how many of those there are follows the fifth limit, that of
commands: what one took beside its own time says how busy the machine is.

What waits here waits in a queue: the seconds are reported, and no deadline of a command or an attempt runs.
"""

from __future__ import annotations

import time
from pathlib import Path

from agentrl.errors import BoundaryError, ExecUnknown
from agentrl.types import ExecStatus
from envs.sandbox.contract import Backend
from envs.sandbox.pressure import Limit, Pressure
from harness.gateway import wire
from services.gateway.ration import Ration

IMAGES_AT_ONCE = 3
"""Pulls, and builds."""


class Limiters:
    """The five limits of one gateway. `permits` are the run permits that follow that of commands."""

    def __init__(self, *, creates: int, permits: Ration) -> None:
        self.create = Pressure(creates)
        self.delete = Pressure(2 * creates)
        self.pull = Pressure(IMAGES_AT_ONCE)
        self.build = Pressure(IMAGES_AT_ONCE)
        self.exec = Limit(int(permits.capacity["permits"]))
        self._permits = permits
        self._there: set[str] = set()
        """What was prepared once, and is found again at no cost: it waits for nobody's build."""

    async def prepare(self, backend: Backend, environment_dir: str) -> tuple[str, float]:
        """`Backend.prepare` in its turn: the digest, and the seconds that were waited."""
        if environment_dir in self._there:
            return await backend.prepare(environment_dir), 0.0
        async with self._of(environment_dir).slot() as waited_s:
            digest = await backend.prepare(environment_dir)
        self._there.add(environment_dir)
        return digest, waited_s

    def _of(self, environment: str) -> Pressure:
        """A folder is built; a name is pulled."""
        return self.build if Path(environment).is_dir() else self.pull

    def ran(self, began: float, *, status: ExecStatus | None, own_ms: float) -> None:
        """A command that began then (monotonic) was answered now, and says that it took so long itself. One
        that did not exit by itself was waited for by design, and says nothing."""
        if status is ExecStatus.EXITED:
            self.exec.learn(max(0.0, time.monotonic() - began - own_ms / 1000))
            self._follow()

    def broke(self, error: BoundaryError) -> None:
        """A command was not answered."""
        if isinstance(error, ExecUnknown) or error.code == "no_answer":
            self.exec.learn(0.0, failed=True)
            self._follow()

    def _follow(self) -> None:
        if int(self.exec.limit) != self._permits.capacity["permits"]:
            self._permits.resize(permits=float(int(self.exec.limit)))

    def views(self) -> dict[wire.Limited, wire.LimiterView]:
        """By operation."""
        at_once: dict[wire.Limited, Pressure] = {
            "create": self.create,
            "delete": self.delete,
            "pull": self.pull,
            "build": self.build,
        }
        found = {
            name: wire.LimiterView(
                limit=each.limit,
                maximum=each.number.maximum,
                busy=each.in_flight,
                waiting=each.waiting,
                decreased=each.number.decreased,
            )
            for name, each in at_once.items()
        }
        found["exec"] = wire.LimiterView(
            limit=self.exec.limit,
            maximum=self.exec.maximum,
            busy=int(self._permits.in_use["permits"]),
            waiting=self._permits.waiting(),
            decreased=self.exec.decreased,
        )
        return found
