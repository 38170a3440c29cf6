"""Where a run's policy is sampled: in this process, or by servers; and how new weights get there.

Both follow the same published versions. A version is verified (its bytes are those that were published)
before it is loaded, and servers are compared with what those weights say here: nothing is sampled from
weights that differ.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

import torch

from agentrl import config as configuration
from agentrl.errors import ConfigError
from agentrl.inference.local import LocalSampler
from agentrl.inference.sampler import Sampler
from agentrl.inference.vllm import Probe, VllmSampler
from agentrl.learner import publish
from agentrl.training import ranks
from agentrl.training.sampling import Workplace
from agentrl.types import LogProbKind, PolicyVersion
from harness.prompt import SYSTEM_PROMPT


class Served(Protocol):
    """The policy of a run, ready to be sampled."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def max_context(self) -> int | None:
        """Tokens that a prompt and its reply may have together."""
        ...

    async def follow(self, version: PolicyVersion) -> None:
        """Sample from a published version from now on. Raises `ModelError`; the old one stands then."""
        ...

    async def close(self) -> None: ...


class InProcess:
    """The in-process sampler of one model object."""

    def __init__(self, sampler: LocalSampler) -> None:
        self.sampler = sampler

    @property
    def max_context(self) -> int | None:
        return self.sampler.max_context

    async def follow(self, version: PolicyVersion) -> None:
        fresh = await asyncio.to_thread(publish.load_published, version)
        await self.sampler.publish(fresh.state_dict(), version.number)

    async def close(self) -> None:
        await self.sampler.close()


class OnServers:
    """vLLM servers, made by `connect`."""

    def __init__(self, sampler: VllmSampler, place: Workplace) -> None:
        self.sampler = sampler
        self._place = place

    @classmethod
    async def connect(cls, place: Workplace, *, temperature: float) -> OnServers:
        """Wait for the servers of a run.

        Raises:
            ConfigError: their log-probs are not those of what is sampled at `temperature`.
            ModelError: they do not come up.
        """
        wanted = place.config.policy.server
        sampler = await VllmSampler.connect(
            wanted.urls, key=configuration.environment("SERVER_KEY"), deadline_s=wanted.start_timeout_s
        )
        if sampler.log_prob_kind is LogProbKind.RAW and temperature not in (0.0, 1.0):
            await sampler.close()
            raise ConfigError(
                f"The servers give log-probs at temperature 1, the run samples at {temperature}.",
                fix="Start vLLM with --logprobs-mode processed_logprobs.",
            )
        return cls(sampler, place)

    @property
    def max_context(self) -> int | None:
        return min(self.sampler.max_context, self._place.max_context or self.sampler.max_context)

    async def follow(self, version: PolicyVersion) -> None:
        location, probe = await asyncio.to_thread(self._probe, version)
        await self.sampler.publish(
            location,
            version.number,
            content_hash=version.content_hash,
            in_flight=self._place.config.policy.server.in_flight,
            probe=probe,
        )

    def _probe(self, version: PolicyVersion) -> tuple[str, Probe]:
        """Where the servers find a version, and what it says about a prompt of the run."""
        ids = self._place.chat.prompt([{"role": "user", "content": SYSTEM_PROMPT}])
        probe = Probe(
            ids=ids,
            log_probs=prompt_log_probs(publish.load_published(version), ids),
            tolerance=self._place.config.train.max_mismatch,
        )
        return str(Path(version.location).resolve()), probe

    async def close(self) -> None:
        await self.sampler.close()


def prompt_log_probs(model: Any, ids: tuple[int, ...]) -> tuple[float | None, ...]:
    """Log-prob of each id given those before it, by one forward; the first is None."""
    with torch.inference_mode():
        logits_TV = model.eval()(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        logp_T = torch.log_softmax(logits_TV[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return (None, *logp_T.tolist())


async def serve(place: Workplace, version: PolicyVersion, *, seed: int) -> Served:
    """The policy of a run at `version`, where its configuration says.

    Raises:
        ConfigError, ModelError: see `OnServers.connect` and `follow`.
    """
    config = place.config
    if config.policy.server.urls:
        servers = await OnServers.connect(place, temperature=config.rollout.temperature)
        try:
            await servers.follow(version)
        except BaseException:
            await servers.close()
            raise
        return servers
    return InProcess(
        LocalSampler(
            publish.load_published(version, device=ranks.device(config)),
            stop_token_ids=place.chat.stop_token_ids,
            name=config.policy.source,
            version=version.number,
            max_slots=config.sandbox.concurrency,
            max_context=place.max_context,
            seed=seed,
        )
    )
