"""A run that is killed goes on: no finished group lost, none trained twice."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from agentrl.store.store import Store

UPDATES = 3
RUN_FILE = """
[run]
name = "killed"
dir = "{folder}"
threads = 1
[tasks]
train = 6
heldout = 2
[sandbox]
backend = "plain"
[policy.small]
hidden_size = 128
heads = 2
context = 1024
[rollout]
groups = 2
group_size = 2
max_tokens = 8
[train]
recipe = "reinforce"
updates = {updates}
learning_rate = 3e-6
schedule = "linear"
[train.overrides.penalty]
entropy_bonus = {{ coefficient = 0.01 }}
[eval]
tasks = 2
"""


def test_a_run_killed_in_the_middle_of_training_resumes_without_losing_or_repeating_anything(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE.format(folder=folder, updates=UPDATES))
    command = [sys.executable, "-m", "agentrl.cli.main", "train", str(run_file), "--json"]
    victim = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _until(lambda: _count(folder, "updates") >= 1, victim, seconds=120)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait(30)
    with Store.open(folder / "store.db") as store:
        run_id = store.runs()[0].id
        kept = {row.id: row.content_hash for row in store.trajectories(run_id, limit=None)}
        versions = [v.number for v in store.policy_versions(run_id)]
    assert kept

    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["run_id"] == run_id
    with Store.open(folder / "store.db") as store:
        rows = store.trajectories(run_id, limit=None)
        now = {row.id: row.content_hash for row in rows}
        assert kept.items() <= now.items(), "what was stored before the kill is still there, unchanged"
        assert store.verify(run_id).ok
        assert [u.step for u in store.updates(run_id)] == list(range(1, UPDATES + 1))
        assert store.unconsumed(run_id) == ()
        rates = [row.value for row in store.metrics(run_id, ["optimizer/learning_rate"])]
        assert rates == pytest.approx([3e-6, 2e-6, 1e-6]), "the run file's schedule goes on where it was"
        after = [v.number for v in store.policy_versions(run_id)]
        assert after[: len(versions)] == versions
        assert after == list(range(len(after)))
        members = Counter(row.group_id for row in rows if row.phase == "train")
        assert set(members.values()) == {2}
        assert len(members) == 2 * UPDATES


def test_sigterm_stops_a_run_that_a_script_put_into_the_background(tmp_path: Path) -> None:
    """Such a process has SIGINT ignored from its start."""
    folder = tmp_path / "run"
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE.format(folder=folder, updates=UPDATES))
    command = f"trap '' INT; exec {sys.executable} -m agentrl.cli.main train {run_file}"
    stopped = subprocess.Popen(
        ["sh", "-c", command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        _until(lambda: _count(folder, "tasks") >= 1, stopped, seconds=120)
        stopped.terminate()
        _, told = stopped.communicate(timeout=60)
    finally:
        stopped.kill()
    assert stopped.returncode == 130
    assert "--resume" in told


def _until(condition, victim: subprocess.Popen, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert victim.poll() is None, "the run ended by itself before it could be killed"
        assert time.monotonic() < deadline, f"no update within {seconds} s"
        time.sleep(0.05)


def _count(folder: Path, table: str) -> int:
    path = folder / "store.db"
    if not path.exists():
        return 0
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)
    try:
        return int(connection.execute(f"select count(*) from {table}").fetchone()[0])
    except sqlite3.OperationalError:
        return 0
    finally:
        connection.close()
