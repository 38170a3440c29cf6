"""Scarce things to those who wait for them: a fair queue over tenants, all of a group at once or none of it.

Start-time fair queuing: each tenant has a virtual time that grows by `claims / weight` with what it is
given, and the tenant that is furthest behind comes next. Its oldest unit (one claim, or a group) is given
when all of it fits; until then nobody overtakes it, so that large groups do not starve. A tenant at its own
quota is passed over. Who was idle has saved nothing.

Nothing here waits or knows the clock of a session: a `Claim` has a future, and its owner decides how long.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False, kw_only=True)
class Claim:
    """One wish, granted or not. Give it back with `Ration.release`, granted or not."""

    tenant: str
    needs: Mapping[str, float]
    granted: asyncio.Future[None]
    offered_at: float
    """Monotonic."""
    granted_at: float | None = None
    released: bool = False

    @property
    def waited_s(self) -> float:
        """In the queue, so far or in all."""
        return (self.granted_at if self.granted_at is not None else time.monotonic()) - self.offered_at


@dataclass(slots=True)
class _Tenant:
    name: str
    weight: float = 1.0
    quota: float = math.inf
    virtual: float = 0.0
    held: int = 0
    waiting: int = 0
    units: deque[list[Claim]] = field(default_factory=deque)


class Ration:
    """A capacity by resource (`{"slots": 32, "memory_mib": 8192}`), shared out."""

    def __init__(self, **capacity: float) -> None:
        self.capacity: Mapping[str, float] = capacity
        self.in_use: dict[str, float] = dict.fromkeys(capacity, 0.0)
        self.paused: str | None = None
        """Why nothing is given now."""
        self._tenants: dict[str, _Tenant] = {}
        self._clock = 0.0

    def tenant(self, name: str, *, weight: float = 1.0, quota: float = math.inf) -> None:
        """Weight and quota (claims held at once) of a tenant, from now on."""
        one = self._tenants.setdefault(name, _Tenant(name))
        one.weight, one.quota = weight, quota
        self._share_out()

    def impossible(self, tenant: str, needs: Mapping[str, float], count: int) -> str | None:
        """Why `count` claims of that size can never be granted together; None when they can."""
        for name, amount in needs.items():
            if amount * count > self.capacity[name]:
                return f"{count} x {amount:g} {name} of {self.capacity[name]:g}"
        quota = self._tenants[tenant].quota
        return f"{count} sessions of the tenant's {quota:g}" if count > quota else None

    def hopeless(self) -> list[tuple[Claim, str]]:
        """Waiting claims whose unit can not be granted as things are now, however long it waits, and why."""
        found = []
        for tenant in self._tenants.values():
            for unit in tenant.units:
                largest = {n: max(c.needs.get(n, 0.0) for c in unit) for n in self.capacity}
                why = self.impossible(tenant.name, largest, len(unit))
                found += [(claim, why) for claim in unit if why is not None]
        return found

    def claim(self, tenant: str, **needs: float) -> Claim:
        """A claim that counts as waiting; it stands in the queue once `queue` has it."""
        self._tenants[tenant].waiting += 1
        waiting = asyncio.get_running_loop().create_future()
        return Claim(tenant=tenant, needs=needs, granted=waiting, offered_at=time.monotonic())

    def queue(self, unit: Sequence[Claim]) -> None:
        """Claims of one tenant to be granted together; grants at once what fits."""
        tenant = self._tenants[unit[0].tenant]
        if not tenant.units:
            tenant.virtual = max(tenant.virtual, self._clock)
        tenant.units.append(list(unit))
        self._share_out()

    def seize(self, claim: Claim) -> None:
        """Grant it now, whatever there is left: its holder lives already. Nobody else is granted anything
        until there is room again."""
        self._grant(self._tenants[claim.tenant], claim)

    def release(self, claim: Claim) -> None:
        """Give back what was granted, or stop waiting. Idempotent."""
        if claim.released:
            return
        claim.released = True
        tenant = self._tenants[claim.tenant]
        if claim.granted_at is not None:
            tenant.held -= 1
            for name, amount in claim.needs.items():
                self.in_use[name] -= amount
        else:
            tenant.waiting -= 1
            claim.granted.cancel()
            for unit in list(tenant.units):
                if claim in unit:
                    unit.remove(claim)
                    if not unit:
                        tenant.units.remove(unit)
        self._share_out()

    def resize(self, **capacity: float) -> None:
        """Have so much of a resource from now on. Who holds more keeps it; nothing is given until it fits."""
        self.capacity = {**self.capacity, **capacity}
        self._share_out()

    def pause(self, why: str) -> None:
        """Grant nothing until `resume`."""
        self.paused = why

    def resume(self) -> None:
        self.paused = None
        self._share_out()

    def position(self, claim: Claim) -> int | None:
        """Place among its tenant's waiting claims, from 1; None when it is not in the queue."""
        place = 0
        for unit in self._tenants[claim.tenant].units:
            if claim in unit:
                return place + unit.index(claim) + 1
            place += len(unit)
        return None

    def waiting(self, tenant: str | None = None) -> int:
        """Claims not yet granted, of one tenant or of all."""
        if tenant is not None:
            return self._tenants[tenant].waiting
        return sum(one.waiting for one in self._tenants.values())

    def _share_out(self) -> None:
        while self.paused is None:
            able = [t for t in self._tenants.values() if t.units and t.held + len(t.units[0]) <= t.quota]
            if not able:
                return
            first = min(able, key=lambda t: (t.virtual, t.name))
            unit = first.units[0]
            if not self._fits(unit):
                return
            first.units.popleft()
            self._clock = first.virtual
            first.virtual += len(unit) / first.weight
            for claim in unit:
                self._grant(first, claim)

    def _fits(self, unit: Sequence[Claim]) -> bool:
        return all(
            self.in_use[name] + sum(claim.needs.get(name, 0.0) for claim in unit) <= limit
            for name, limit in self.capacity.items()
        )

    def _grant(self, tenant: _Tenant, claim: Claim) -> None:
        tenant.waiting -= 1
        tenant.held += 1
        for name, amount in claim.needs.items():
            self.in_use[name] += amount
        claim.granted_at = time.monotonic()
        if not claim.granted.done():
            claim.granted.set_result(None)
