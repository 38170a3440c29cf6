"""Where in the training set a run stands: the order of every epoch is a function of (seed, epoch).

So a cursor that was saved in the middle of epoch 1 continues with epoch 1's order, and a resumed run sees the
items an uninterrupted run would have seen: none lost, none twice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Immutable; `take` answers items and the next cursor."""

    seed: int
    size: int
    """Items of the set."""
    epoch: int = 0
    position: int = 0
    """Items of this epoch already taken."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.epoch < 0 or not 0 <= self.position <= self.size:
            raise ConfigError(f"No place in a set of {self.size}: epoch {self.epoch}, item {self.position}.")

    def order(self) -> list[int]:
        """All items in the order of the current epoch."""
        order: list[int] = np.random.default_rng((self.seed, self.epoch)).permutation(self.size).tolist()
        return order

    def take(self, n: int) -> tuple[list[int], Cursor]:
        """The next `n` items, over the end of the epoch if need be, and the cursor after them."""
        cursor = self
        taken: list[int] = []
        while len(taken) < n:
            if cursor.position == cursor.size:
                cursor = replace(cursor, epoch=cursor.epoch + 1, position=0)
            part = cursor.order()[cursor.position :][: n - len(taken)]
            taken += part
            cursor = replace(cursor, position=cursor.position + len(part))
        return taken, cursor

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, int]) -> Cursor:
        return Cursor(**data)
