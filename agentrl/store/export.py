"""A run to a file of JSON lines and back: equal records, the same chain.

The first line is the sealed run, then one line per trajectory (phase, step, hashes, the record), then a line
that says how many there are and how the chain ends. The whole file is checked before anything of it is
stored, and the importing store computes the chain anew: an imported run has the head that it was exported
with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.errors import AgentRLError, StoreError
from agentrl.store import runs
from agentrl.store.chain import Head
from agentrl.store.layout import canonical, trajectory_hash
from agentrl.store.rows import RunRow
from agentrl.store.store import Store
from agentrl.types import Trajectory, from_json, to_json

FORMAT = 1
_RUN_FIELDS = ("id", "name", "algo", "seed", "config", "config_hash", "parent_id", "started_at", "seal")


def export_run(store: Store, run_id: str, path: Path) -> int:
    """Write a run; returns the number of trajectories. The file appears whole or not at all.

    Raises:
        StoreError: there is no such run, or a stored trajectory is no longer what was written.
    """
    run = store.run(run_id)
    unfinished = path.with_name(path.name + ".part")
    head = Head(0, run.seal)
    with unfinished.open("w", encoding="utf-8", newline="\n") as file:
        file.write(
            canonical({"format": FORMAT, "run": {name: getattr(run, name) for name in _RUN_FIELDS}}) + "\n"
        )
        for row, record in store.iter_stored(run_id):
            content = trajectory_hash(record, phase=row["phase"], step=row["step"])
            head = head.then(content)
            if content != row["content_hash"] or head.link != row["chain"]:
                raise StoreError(
                    f"trajectory {record.id} is not what was written.", fix="Run `verify` on the run."
                )
            place = {"phase": row["phase"], "step": row["step"], "content_hash": content, "chain": head.link}
            file.write(f'{canonical(place)[:-1]},"record":{to_json(record).decode()}}}\n')
        file.write(canonical({"trajectories": head.length, "head": head.link}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    return head.length


def import_run(store: Store, path: Path) -> RunRow:
    """Read a run into a store; what is there already stays once.

    Raises:
        StoreError: the file is cut, changed or not an export; names the line. Nothing is stored then.
    """
    for _ in _checked(path):
        pass
    run_id = ""
    for values, record in _checked(path):
        if record is None:
            if values["parent_id"] is not None and values["parent_id"] not in {
                run.id for run in store.runs()
            }:
                raise StoreError(
                    f"run {values['id']} resumes run {values['parent_id']}, which is not in {store.url}.",
                    fix="Import that one first.",
                )
            run_id = store.restore_run(values).id
        else:
            store.add_trajectory(run_id, record, phase=values["phase"], step=values["step"])
    return store.run(run_id)


def read_export(path: Path) -> Iterator[Trajectory]:
    """The records of an export, each checked against its hash and the chain."""
    for _, record in _checked(path):
        if record is not None:
            yield record


def _checked(path: Path) -> Iterator[tuple[dict[str, Any], Trajectory | None]]:
    """The sealed run first (without a record), then each place with its record."""
    head: Head | None = None
    ended = False
    with path.open(encoding="utf-8") as file:
        for at, line in enumerate(file, start=1):
            where = f"{path}, line {at}"
            try:
                if ended:
                    raise StoreError("there is more after the last line of the run.")
                if head is None:
                    values = _sealed(json.loads(line))
                    head = Head(0, values["seal"])
                    yield values, None
                    continue
                values = json.loads(line)
                if "record" not in values:
                    if values != {"trajectories": head.length, "head": head.link}:
                        raise StoreError(
                            f"the run ends after {head.length} trajectories in another way than it says."
                        )
                    ended = True
                    continue
                record = from_json(Trajectory, canonical(values.pop("record")))
                content = trajectory_hash(record, phase=values["phase"], step=values["step"])
                head = head.then(content)
                if content != values["content_hash"] or head.link != values["chain"]:
                    raise StoreError("its content or its place in the chain was changed.")
            except (AgentRLError, ValueError, KeyError, TypeError) as error:
                raise StoreError(f"{where}: {error}", fix="Export the run again.") from error
            yield values, record
    if not ended:
        raise StoreError(f"{path} ends before its last line.", fix="Export the run again.")


def _sealed(first: Any) -> dict[str, Any]:
    """The run of the first line, as the store keeps it."""
    if first.get("format") != FORMAT:
        raise StoreError(f"format {first.get('format')!r} is not the format {FORMAT} of an export.")
    run = dict(first["run"])
    values = {**run, "config": canonical(run["config"]), "state": "running", "finished_at": None}
    if runs.seal(values) != run["seal"]:
        raise StoreError("the run does not match its seal.")
    return values
