"""`runs profile`, `bench learner`: where the learner's time and memory go, here and beside others."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import typer

import agentrl
from agentrl.cli import locate, output
from agentrl.cli.boundary import FAILED
from agentrl.errors import ConfigError

PHASES = (
    ("collect", "time/collect_s", "wait for trajectories"),
    ("data", "time/data_s", "records to columns and micro-batches"),
    ("columns", "time/columns_s", "passes before the update: values, reference, teacher, proximal"),
    ("forward", "time/forward_s", "log-probs of the actions"),
    ("backward", "time/backward_s", "loss and gradient"),
    ("optimizer", "time/optimizer_s", "clipping and AdamW"),
    ("publish", "time/publish_s", "weights out, records in, sampler moved"),
)
"""Name, metric and meaning of each part of an update."""
RATES = (
    ("tokens/s", "batch/tokens_per_s", "computed, prefixes once"),
    ("row tokens/s", "batch/row_tokens_per_s", "of the rows that were trained"),
    ("sharing ratio", "batch/sharing_ratio", "row tokens for each computed one"),
    ("padding share", "batch/padding_share", "of the computed tokens"),
    ("operations/s", "profile/operations_per_s", "of the model, in forward and backward"),
    ("MFU", "profile/mfu", "of what a matrix product reaches on this device"),
    ("peak memory MiB", "profile/peak_memory_mib", "of the process, or of the GPU's tensors"),
)
BENCH = Path("tests") / "benchmarks" / "bench_learner.py"


def profile_run(run: str | None, *, store: str | None, as_json: bool) -> None:
    """Mean seconds of each part of an update, rates, and the largest memory."""
    with locate.run_in(run, store) as (here, row):
        names = [metric for _, metric, _ in (*PHASES, *RATES)]
        values: dict[str, list[float]] = {name: [] for name in names}
        for point in here.metrics(row.id, names):
            values[point.name].append(point.value)
        updates = len(here.updates(row.id))
    if not any(values.values()):
        raise ConfigError(
            f"Run {row.id} has no update with a profile.", fix="Train at least one update; then ask again."
        )
    mean = {name: sum(v) / len(v) for name, v in values.items() if v}
    largest = max(values["profile/peak_memory_mib"], default=None)
    if largest is not None:
        mean["profile/peak_memory_mib"] = largest
    total = sum(mean.get(metric, 0.0) for _, metric, _ in PHASES)
    if as_json:
        output.emit({"run": row.id, "updates": updates, "seconds": total, "metrics": mean})
        return
    output.table(
        ("part of an update", "mean s", "share", "what it is"),
        [
            (name, f"{mean[metric]:.3f}", output.share(mean[metric] / total if total else None), meaning)
            for name, metric, meaning in PHASES
            if metric in mean
        ],
        numbers=("mean s", "share"),
    )
    output.say()
    output.table(
        ("rate", "value", "what it is"),
        [(name, f"{mean[metric]:.4g}", meaning) for name, metric, meaning in RATES if metric in mean],
        numbers=("value",),
    )


def bench_learner(options: Sequence[str], *, as_json: bool) -> None:
    """Run the comparison of a source checkout; it speaks for itself, or on stderr beside one JSON object."""
    script = Path(agentrl.__file__).parent.parent / BENCH
    if not script.exists():
        raise ConfigError(
            f"The comparison is not part of an installed package: {BENCH} is not beside it.",
            fix=f"Take a checkout of the source, `pip install -e .` there, and ask again (or run {BENCH}).",
        )
    with tempfile.TemporaryDirectory() as folder:
        numbers = Path(folder, "numbers.json")
        extra = [f"--out={numbers}"] if as_json else []
        done = subprocess.run(
            [sys.executable, str(script), *options, *extra],
            check=False,
            stdout=sys.stderr.fileno() if as_json else None,
        )
        if done.returncode != 0:
            raise typer.Exit(FAILED)
        if as_json:
            output.emit(json.loads(numbers.read_text()))
