"""Metrics of a run as TensorBoard scalars, one event file per process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class Curves:
    """Writes scalars; flushed at every update, so that a killed run keeps its curves."""

    def __init__(self, folder: Path) -> None:
        self._writer = SummaryWriter(str(folder))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
