"""A seed means one cold start, whatever the machine does meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl import config
from agentrl.learner.step import Learner
from agentrl.training import loop, sampling
from agentrl.training.events import Silent

RUN_FILE = """
[run]
dir = "{folder}"
threads = 1
[tasks]
train = 4
heldout = 2
demonstrated = 4
[sandbox]
backend = "plain"
[policy.small]
hidden_size = 128
heads = 2
context = 1024
[coldstart]
demonstrations = 4
threads = 3
epochs = 1
[train]
updates = 0
[eval]
tasks = 0
"""


def test_demonstrations_are_imitated_in_the_order_they_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last to finish first: the optimizer's steps are the same."""
    asked: list[str] = []
    imitated: list[str] = []
    threads: list[int] = []

    async def backwards(place: Any, requests: Any, *rest: Any, **more: Any) -> Any:
        asked.extend(request.id for request in requests)
        found = await collect(place, requests, *rest, **more)
        return sorted(found, key=lambda t: t.id, reverse=True)

    def noted(self: Learner, examples: Any, **more: Any) -> list[float]:
        imitated.extend(t.group_id for t in examples)
        threads.append(torch.get_num_threads())
        return imitate(self, examples, **more)

    collect, imitate = sampling.collect, Learner.imitate
    monkeypatch.setattr(sampling, "collect", backwards)
    monkeypatch.setattr(Learner, "imitate", noted)
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE.format(folder=tmp_path / "run"))
    loop.run(config.load(run_file, []), listener=Silent())
    assert len(asked) == 4
    assert imitated == asked
    assert threads == [3], "imitation has its own number of threads"
