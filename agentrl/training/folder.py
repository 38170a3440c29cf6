"""The folder of a run: what lies where, who holds it, and which configuration it belongs to."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.errors import ConfigError

KEY_BYTES = 32


class RunFolder:
    """Paths under one folder, and the note that says which run it holds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tasks = root / "tasks"
        self.versions = root / "versions"
        self.checkpoints = root / "checkpoints"
        self.tokenizer = root / "tokenizer"
        self.tensorboard = root / "tensorboard"
        self.report = root / "report.html"
        self._note = root / "run.json"
        self._key = root / "signing.key"
        self._lock = root / "lock"

    def begun(self) -> tuple[str, RunConfig] | None:
        """The run that was begun here and its configuration; None for a folder without one."""
        if not self._note.exists():
            return None
        try:
            note = json.loads(self._note.read_text())
            return note["run_id"], RunConfig.model_validate(note["config"])
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{self._note} is not the note of a run that this version can go on with.",
                fix="Restore it from a copy, or start a new run in another folder.",
            ) from error

    def begin(self, run_id: str, config: RunConfig) -> None:
        """Note the run, whole or not at all."""
        beside = self._note.with_suffix(".new")
        beside.write_text(json.dumps({"run_id": run_id, "config": config.model_dump(mode="json")}, indent=1))
        os.replace(beside, self._note)

    def check(self, config: RunConfig, *, resume: bool) -> str | None:
        """The id of the run to go on with, or None for a fresh folder.

        Raises:
            ConfigError: a run is here and `resume` is not asked for, or there is none to resume, or it was
            begun with
                another configuration (the keys that differ are named).
        """
        begun = self.begun()
        if begun is None:
            if resume:
                raise ConfigError(
                    f"There is no run in {self.root} to resume.", fix="Start it without --resume."
                )
            return None
        run_id, before = begun
        if not resume:
            raise ConfigError(
                f"{self.root} already holds run {run_id}.",
                fix="Go on with it by --resume, or choose another folder with --set run.dir=…",
            )
        if before.hash != config.hash:
            differing = ", ".join(
                sorted(_differences(before.model_dump(mode="json"), config.model_dump(mode="json")))
            )
            raise ConfigError(
                f"Run {run_id} was begun with another configuration: {differing} differ.",
                fix="Resume with the same run file and overrides.",
            )
        return run_id

    def signing_key(self) -> bytes:
        """The key that signs this run's verdicts; made once, readable by its owner only."""
        if not self._key.exists():
            descriptor = os.open(self._key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(secrets.token_bytes(KEY_BYTES))
        return self._key.read_bytes()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for this process; the lock ends with it, however it ends."""
        self.root.mkdir(parents=True, exist_ok=True)
        with self._lock.open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"Another process is working in {self.root}.",
                    fix="Wait for it to end, or choose another folder.",
                ) from error
            yield


def _differences(a: dict[str, object], b: dict[str, object], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key in a.keys() | b.keys():
        left, right, name = a.get(key), b.get(key), f"{prefix}{key}"
        if isinstance(left, dict) and isinstance(right, dict):
            found |= _differences(left, right, f"{name}.")
        elif left != right and name not in ("run.dir", "run.store"):
            found.add(name)
    return found
