"""A person at a terminal as the policy: what is typed becomes the tool calls of a demonstration.

A `Script` for `ScriptedSampler`: the person sees the instruction, the tools and what each call caused, and
types calls in short form. The recorded ids are those that the model's own format gives these calls, so
imitation learns from them as from any other demonstration.

    bash ls -l                       the only argument of a tool is the rest of the line
    read_file path=calc.py           others by name, quoted as in a shell
    replace_in_file path=calc.py old=<< new=<<      each << reads lines up to one with a dot alone
    submit
    say I am done.                   a reply without a call, which ends the attempt
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.inference.sampler import SampleRequest
from harness.chat import ChatFormat

SAY = "say"
LINES = "<<"
END = "."


class Human:
    """The script of one attempt.

    Args:
        tools: schemas of the session's tools.
        read: asks for a line with a prompt; `EOFError` (Ctrl-D) gives up with a reply without a call.
        show: shows text.
    """

    def __init__(
        self,
        chat: ChatFormat,
        tools: Sequence[Mapping[str, Any]],
        *,
        read: Callable[[str], str],
        show: Callable[[str], None],
    ) -> None:
        self._chat = chat
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._read = read
        self._show = show
        self._seen = 0

    async def __call__(self, request: SampleRequest, number: int) -> str:
        """The next reply, as soon as one can be made of what is typed."""
        new = request.prompt_token_ids[self._seen :]
        text = self._chat.tokenizer.decode(list(new), skip_special_tokens=True)
        self._show(str(text).strip())
        reply = await asyncio.to_thread(self._typed, number)
        self._seen = len(request.prompt_token_ids) + len(self._chat.encode_reply(reply))
        return reply

    def _typed(self, number: int) -> str:
        while True:
            try:
                line = self._read(f"{number + 1}> ").strip()
            except EOFError:
                return "I give up."
            if line.partition(" ")[0] == SAY:
                return line.partition(" ")[2] or "Done."
            try:
                name, arguments = call(line, self._tools, lambda what: self._lines(what))
            except ValueError as problem:
                self._show(str(problem))
                continue
            return self._chat.tool_format.written(name, arguments)

    def _lines(self, what: str) -> str:
        self._show(f"{what}, up to a line with only '{END}':")
        lines = []
        while (line := self._read("... ")) != END:
            lines.append(line)
        return "\n".join(lines)


def call(
    line: str, tools: Mapping[str, Mapping[str, Any]], lines: Callable[[str], str]
) -> tuple[str, dict[str, Any]]:
    """A typed line as a call. `ValueError` says what is wrong in words for the person.

    Args:
        lines: reads several lines for the argument that it is told.
    """
    name, _, rest = line.partition(" ")
    if name not in tools:
        raise ValueError(f"There is no tool '{name}'. There are: {', '.join([*tools, SAY])}.")
    given: Mapping[str, Any] = tools[name]["parameters"].get("properties", {})
    required = tools[name]["parameters"].get("required", [])
    rest = rest.strip()
    if len(required) == 1 and rest and not rest.startswith(f"{required[0]}="):
        return name, {required[0]: rest}
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise ValueError(f"The quotes do not match: {error}.") from error
    arguments: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in given:
            raise ValueError(f"'{word}' is no argument of {name}. It takes: {', '.join(given) or 'none'}.")
        arguments[key] = lines(key) if value == LINES else _value(value, given[key])
    missing = [key for key in required if key not in arguments]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)}.")
    return name, arguments


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("type") in (None, "string"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"'{text}' is not of type {schema['type']}.") from error
