"""A whole run whose policy is sampled by a server: the loop, the publications and the gate between them.

The server speaks vLLM's protocol on loopback with the run's own model behind it, so every log-prob it says
is that of the weights it was given.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import Answer, FakeVllm
from fake_vllm import log_probs as hashed
from transformers import AutoModelForCausalLM

from agentrl import config as configuration
from agentrl.errors import ConfigError, ModelError
from agentrl.store.store import Store
from agentrl.training import loop
from agentrl.training.events import Silent


def read(location: str) -> Any:
    """The published model of a folder, or what the server was started with."""
    if location.startswith("weights:"):
        return 0
    return AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32).eval()


def say(weights: Any, prefix: Any, *, temperature: float = 1.0, off: float = 0.0) -> list[float]:
    """Of every next id: by the published model, or before the first publication by a function."""
    if isinstance(weights, int):
        return hashed(weights, prefix, temperature=temperature)
    with torch.inference_mode():
        logits = weights(input_ids=torch.tensor([list(prefix)]), use_cache=False).logits[0, -1].double()
        logits[0] += off
        found: list[float] = torch.log_softmax(logits / (temperature or 1.0), -1).tolist()
    return found


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    """A server with an event loop of its own, as another process would have."""
    made = FakeVllm(context=1024, vocab=100_000, say=say, read=read)
    home = asyncio.new_event_loop()
    thread = threading.Thread(target=home.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(made.start(), home).result(30)
    try:
        yield made
    finally:
        asyncio.run_coroutine_threadsafe(made.stop(), home).result(30)
        home.call_soon_threadsafe(home.stop)
        thread.join(30)
        home.close()


def config(folder: Path, server: FakeVllm, **rollout: Any) -> configuration.RunConfig:
    return configuration.parse(
        {
            "run": {"name": "served", "dir": str(folder), "threads": 1},
            "tasks": {"train": 2, "heldout": 1},
            "sandbox": {"backend": "plain"},
            "policy": {
                "small": {"hidden_size": 128, "heads": 2, "context": 1024},
                "server": {"urls": [server.url], "start_timeout_s": 30},
            },
            "rollout": {"groups": 1, "group_size": 2, "max_tokens": 6, **rollout},
            "train": {"recipe": "reinforce", "updates": 2},
        }
    )


def test_a_run_samples_from_servers_that_follow_its_versions(tmp_path: Path, server: FakeVllm) -> None:
    done = loop.run(config(tmp_path / "run", server), listener=Silent())
    assert done.faults == 0
    assert server.sent("/inference/v1/generate")
    with Store.open(done.store) as store:
        versions = store.policy_versions(done.run_id)
        trajectories = list(store.iter_trajectories(done.run_id, phase="train"))
        assert len(trajectories) == 4
        sampled = {v for t in trajectories for c in t.calls for v in c.versions_T()}
        assert sampled
        assert sampled <= {v.number for v in versions}
        assert store.verify(done.run_id).ok
    last = versions[-1]
    assert server.label == f"{last.number}.{last.content_hash[:12]}"
    assert server.pauses == server.resumes == len(versions)
    assert server.paused is None


def test_a_server_that_says_other_log_probs_than_the_learner_stops_the_run(
    tmp_path: Path, server: FakeVllm
) -> None:
    """The sync gate: nothing is trained on what other weights sampled."""
    server.say = lambda *given, **options: say(*given, **options, off=20.0)
    with pytest.raises(ModelError, match="is off the learner by"):
        loop.run(config(tmp_path / "run", server), listener=Silent())
    assert server.paused is None


def test_an_endpoint_is_evaluated_on_the_heldout_tasks_of_a_run(tmp_path: Path, server: FakeVllm) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "submit", "arguments": "{}"}}
    reply = {"choices": [{"message": {"content": "", "tool_calls": [call]}, "finish_reason": "stop"}]}
    server.faults["/v1/chat/completions"].extend([lambda _: Answer(body=reply)] * 3)
    run = config(tmp_path / "run", server, max_tokens=200)
    judged = run.model_copy(
        update={
            "eval": run.eval.model_copy(update={"endpoint": f"{server.url}/v1", "model": "judge", "tasks": 1})
        }
    )
    found = loop.evaluate(judged, checkpoint=None, listener=Silent())
    assert (found.attempted, found.graded, found.faults, found.version) == (1, 1, 0, None)
    assert found.success == 0.0
    (asked,) = server.sent("/v1/chat/completions")
    assert asked["model"] == "judge"
    assert {tool["function"]["name"] for tool in asked["tools"]} >= {"submit", "run_tests"}
    with pytest.raises(ConfigError, match=r"needs eval\.model"):
        loop.evaluate(judged, checkpoint="3", listener=Silent())
