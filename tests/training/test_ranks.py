"""A run on two processes, as `torchrun` starts them: the same run as on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomlkit
import torch
from safetensors.torch import load_file

from agentrl import config as configuration
from agentrl.errors import ConfigError
from agentrl.training import loop, ranks
from agentrl.training.events import Silent

UPDATES = 2


def config_at(folder: Path, *, updates: int, shard: bool) -> configuration.RunConfig:
    return configuration.parse(
        {
            "run": {"name": "several", "dir": str(folder), "threads": 1, "device": "cpu"},
            "tasks": {"train": 2, "heldout": 1},
            "sandbox": {"backend": "plain"},
            "policy": {"small": {"hidden_size": 128, "heads": 2, "context": 1024}},
            "coldstart": {"demonstrations": 4, "epochs": 1},
            "rollout": {"groups": 2, "group_size": 2, "max_tokens": 8},
            "train": {
                "recipe": "grpo",
                "updates": updates,
                "learning_rate": 1e-4,
                "token_budget": 400,
                "shard": shard,
                "overrides": {
                    "penalty": {"entropy_bonus": {"coefficient": 0.01}, "kl_k3": {"coefficient": 0.1}}
                },
            },
        }
    )


def file_of(config: configuration.RunConfig, path: Path) -> Path:
    path.write_text(tomlkit.dumps(config.model_dump(mode="json", exclude_none=True)))
    return path


def started(run_file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """On two ranks."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "agentrl.cli.main"]
    return subprocess.run(
        [sys.executable, *launch, "train", str(run_file), "--json", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def weights(folder: Path, number: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "versions" / f"v{number:06d}" / "model.safetensors")


def test_two_sharded_ranks_do_the_run_of_one(tmp_path: Path) -> None:
    """Cold start, updates with a reference, publishing and checkpoints; only the order of sums differs."""
    alone = loop.run(config_at(tmp_path / "alone", updates=UPDATES, shard=False), listener=Silent())
    run_file = file_of(config_at(tmp_path / "both", updates=UPDATES, shard=True), tmp_path / "both.toml")
    done = started(run_file)
    assert done.returncode == 0, done.stderr[-3000:]
    both = json.loads(done.stdout)
    assert both["trajectories"] == alone.trajectories == 4 + UPDATES * 4
    assert both["calls_checked"] == both["calls"]
    first = weights(tmp_path / "alone", 0)
    for name, value in weights(tmp_path / "both", 0).items():
        torch.testing.assert_close(value, first[name], rtol=1e-3, atol=1e-4)
    moved = weights(tmp_path / "both", UPDATES)
    assert any(not torch.equal(moved[name], value) for name, value in weights(tmp_path / "both", 0).items())
    again = started(run_file, "--resume")
    assert again.returncode == 0, again.stderr[-3000:]
    assert json.loads(again.stdout)["trajectories"] == both["trajectories"], "there was nothing left to do"


def test_a_run_that_rank_0_refuses_ends_on_all_ranks(tmp_path: Path) -> None:
    config = config_at(tmp_path / "run", updates=1, shard=True)
    done = started(file_of(config, tmp_path / "run.toml"), "--resume")
    assert done.returncode != 0
    assert f"There is no run in {tmp_path / 'run'} to resume" in done.stderr


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = configuration.parse({"run": {"device": "cuda"}})
    monkeypatch.setenv("LOCAL_RANK", str(torch.cuda.device_count()))
    with pytest.raises(ConfigError, match=r"set run\.device to cpu"):
        ranks.device(wanted)


def test_shards_without_further_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Start with torchrun"):
        loop.run(config_at(tmp_path / "run", updates=1, shard=True), listener=Silent())
