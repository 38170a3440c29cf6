"""How faithfully each harness was recorded: which calls extend what came before, token for token.

A call is *exact* when it begins a conversation or extends recorded ids; *forked* when it starts a branch,
with its reason; *refused* when nothing could be recorded, with its cause. Counts of what was not as the
client wished stand beside it: replies that came back written differently (`drift`), sampling settings that
were not obeyed (`overridden`), forced tool choices (`unenforced_…`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.types import JsonScalar, ModelCall, Trajectory

REFUSED = "refused_"
BESIDE = ("drift", "overridden", "unenforced_", "retries_joined")
"""Names (or their beginnings) of other counts in a trajectory's metadata."""


@dataclass(slots=True, kw_only=True)
class Fidelity:
    """Counts over the calls of one harness."""

    harness: str = ""
    trajectories: int = 0
    exact: int = 0
    forked: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    beside: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    """Generated; each of them is trained exactly once, forked or not."""

    @property
    def calls(self) -> int:
        """Requests that asked for a reply."""
        return self.exact + self.forked.total() + self.refused.total()

    def add(self, calls: Iterable[ModelCall], metadata: Mapping[str, JsonScalar]) -> None:
        for call in calls:
            self.tokens += len(call.generation_token_ids)
            if call.branch_reason is None:
                self.exact += 1
            else:
                self.forked[str(call.branch_reason)] += 1
        for name, value in metadata.items():
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            if name.startswith(REFUSED):
                self.refused[name.removeprefix(REFUSED)] += value
            elif name.startswith(BESIDE) and value:
                self.beside[name] += value

    def facts(self) -> dict[str, Any]:
        """For reports. Shares are of all calls; None when there was none."""
        calls = self.calls

        def share(count: int) -> float | None:
            return count / calls if calls else None

        return {
            "harness": self.harness,
            "trajectories": self.trajectories,
            "calls": calls,
            "tokens": self.tokens,
            "exact": self.exact,
            "exact_share": share(self.exact),
            "forked": dict(self.forked),
            "forked_share": share(self.forked.total()),
            "refused": dict(self.refused),
            "refused_share": share(self.refused.total()),
            "beside": dict(self.beside),
        }


def of_calls(calls: Iterable[ModelCall], metadata: Mapping[str, JsonScalar]) -> Fidelity:
    """Of one session."""
    found = Fidelity(trajectories=1)
    found.add(calls, metadata)
    return found


def by_harness(trajectories: Iterable[Trajectory]) -> Sequence[Fidelity]:
    """One row per harness, by name. A trajectory ended by what the policy server got wrong counts as one
    refused call, unless its metadata has counted it."""
    rows: dict[str, Fidelity] = {}
    for one in trajectories:
        row = rows.setdefault(one.harness, Fidelity(harness=one.harness))
        row.trajectories += 1
        row.add(one.calls, one.metadata)
        fault = one.verdict.fault
        counted = any(name.startswith(REFUSED) for name in one.metadata)
        if fault is not None and fault.owner == "model" and not counted:
            row.refused[fault.code] += 1
    return [rows[name] for name in sorted(rows)]
