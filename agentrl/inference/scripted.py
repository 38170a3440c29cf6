"""A policy that follows a script: the demonstrator for imitation, and the fake engine of tests.

It answers ids like any sampler, ended by the stop token, but has no distribution: log-probs are None and
there is no policy version, so that nothing it says can enter a policy loss by mistake.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence

from agentrl.errors import ModelError
from agentrl.inference.sampler import SampleRequest, SampleResult
from agentrl.types import FinishReason

Line = str | Sequence[int]
Script = Callable[[SampleRequest, int], Line | Awaitable[Line]]
"""(request, number of the call within its session, from 0) to what is said: text to be encoded, or ids."""


class ScriptedSampler:
    """Answers from `script`. What the script raises is what `sample` raises.

    Args:
        script: what to say; text is encoded by `encode`, ids are taken as they are.
        encode: text to ids with the end-of-turn token (`ChatFormat.encode_reply`).
        name: what `SampleResult.model` says.
    """

    def __init__(
        self, script: Script, *, encode: Callable[[str], Sequence[int]], name: str = "scripted"
    ) -> None:
        self._script = script
        self._encode = encode
        self._name = name
        self._number: dict[str, dict[str, int]] = {}

    @property
    def model(self) -> str:
        return self._name

    @property
    def policy_version(self) -> int | None:
        return None

    async def sample(self, request: SampleRequest) -> SampleResult:
        """The next line of the session; the same request again gets the same number.

        Raises:
            ModelError: `deadline`, or `empty_generation` when the script says nothing.
        """
        started_at = time.time()
        numbers = self._number.setdefault(request.session, {})
        number = numbers.setdefault(request.id, len(numbers))
        try:
            async with asyncio.timeout(request.deadline_s):
                line = self._script(request, number)
                if inspect.isawaitable(line):
                    line = await line
        except TimeoutError as error:
            raise ModelError(
                f"waiting for the script of {self._name} since {request.deadline_s:.1f} s.",
                code="deadline",
                phase="sample",
            ) from error
        said = tuple(self._encode(line)) if isinstance(line, str) else tuple(line)
        if not said:
            raise ModelError(
                f"the script of {self._name} said nothing in call {number} of {request.session}.",
                fix="Return text or ids.",
                code="empty_generation",
                phase="sample",
                retryable=False,
            )
        ids = said[: request.params.max_tokens]
        return SampleResult(
            request_id=request.id,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=ids,
            log_probs=None,
            log_prob_kind=None,
            policy_versions=(),
            finish_reason=FinishReason.STOP if len(ids) == len(said) else FinishReason.LENGTH,
            model=self._name,
            started_at=started_at,
            finished_at=max(started_at, time.time()),
        )

    async def close(self) -> None:
        self._number.clear()
