"""A model behind an environment's other side: a simulated user, or a simulated tool.

It speaks through any `Sampler`. What it says is an observation of the policy's trajectory, so it is never
trained on, and its own calls are not recorded as the policy's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from agentrl.inference.sampler import Sampler, SampleRequest
from agentrl.types import SamplingParams
from harness.chat import ChatFormat
from harness.prompt import Message


class SampledSpeaker:
    """Answers in a persona: a `Speaker` of `envs.builtin.simulated`. Raises what the sampler raises.

    Args:
        name: begins the session ids of its requests; unique among speakers of one sampler.
        deadline_s: of one answer; keep it below the environment's `limits.exec_timeout_s`.
    """

    def __init__(
        self,
        sampler: Sampler,
        chat: ChatFormat,
        *,
        name: str = "speaker",
        params: SamplingParams | None = None,
        deadline_s: float = 15.0,
    ) -> None:
        wanted = params or SamplingParams(temperature=0.7, max_tokens=128)
        self._sampler = sampler
        self._chat = chat
        self._name = name
        self._params = SamplingParams(
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            max_tokens=wanted.max_tokens,
            stop_token_ids=tuple(dict.fromkeys((*wanted.stop_token_ids, *chat.stop_token_ids))),
        )
        self._deadline_s = deadline_s
        self._number = itertools.count()

    async def __call__(self, persona: str, said: Sequence[tuple[str, str]]) -> str:
        """The next thing that the persona says: to it, the policy is the user."""
        number = next(self._number)
        result = await self._sampler.sample(
            SampleRequest(
                id=f"{self._name}.{number}.c0",
                session=f"{self._name}.{number}",
                prompt_token_ids=self._chat.prompt(self._messages(persona, said)),
                params=self._params,
                deadline_s=self._deadline_s,
            )
        )
        message, _ = self._chat.reply(result.token_ids, turn=0)
        return str(message["content"]).strip()

    def _messages(self, persona: str, said: Sequence[tuple[str, str]]) -> list[Message]:
        messages: list[Message] = [
            {"role": "assistant" if who == "speaker" else "user", "content": text} for who, text in said
        ]
        if self._chat.renders_system:
            return [{"role": "system", "content": persona}, *messages]
        first = messages[0] if messages else {"role": "user", "content": ""}
        return [{"role": "user", "content": f"{persona}\n\n{first['content']}"}, *messages[1:]]
