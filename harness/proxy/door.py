"""The endpoints of one session, without an HTTP server: a request in, a status, headers and bytes out.

    POST …/chat/completions   …/completions   …/responses   …/messages   …/messages/count_tokens
    GET  …/models             …/models/NAME

with or without `/v1` before them. An HTTP server and the bridge into a sandbox both stand in front of it.
When whoever carries the request gives it up (cancels `handle`, or closes the stream), the sampling is
aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from harness.prompt import Message
from harness.proxy import anthropic_messages, openai_chat, openai_completions, openai_responses
from harness.proxy.exchange import Answer, Ask, Refusal
from harness.proxy.model import ProxiedModel, shown
from harness.proxy.retries import Retries

MAX_BODY_BYTES = 32 * 2**20
FIRST_BYTE_S = 5.0
"""How long a stream's status is held back, so that an early failure has its own status."""
PING_S = 10.0
"""Between signs of life in a stream that waits for its reply."""
KEPT_RESPONSES = 4096
"""Conversations kept for `previous_response_id`."""

log = logging.getLogger(__name__)

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`headers` have lower-case names; `path` begins after the session's base URL."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """`body` is whole, or a stream of pieces as they come."""

    status: int
    content_type: str
    body: bytes | AsyncIterable[bytes]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Api:
    parse: Callable[[Mapping[str, Any]], Ask]
    answer: Callable[[Answer], dict[str, Any]]
    stream: Callable[[Answer], Iterator[bytes]]
    error: Callable[[Refusal], dict[str, Any]]
    stream_error: Callable[[Refusal], Iterator[bytes]]
    ping: bytes


_OPENAI_PING = b": waiting\n\n"
_ANTHROPIC_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class Door:
    """What a client of one session can reach.

    Args:
        key: what clients must send, as `Authorization: Bearer` or `x-api-key`; None for no key.
    """

    def __init__(self, model: ProxiedModel, *, key: str | None) -> None:
        self.model = model
        self._key = key
        self._retries: Retries[Answer] = Retries()
        self._conversations: dict[str, tuple[Message, ...]] = {}
        self._apis = {
            "chat/completions": _Api(
                parse=openai_chat.parse,
                answer=openai_chat.answer,
                stream=openai_chat.stream,
                error=openai_chat.error,
                stream_error=openai_chat.stream_error,
                ping=_OPENAI_PING,
            ),
            "completions": _Api(
                parse=openai_completions.parse,
                answer=openai_completions.answer,
                stream=openai_completions.stream,
                error=openai_chat.error,
                stream_error=openai_chat.stream_error,
                ping=_OPENAI_PING,
            ),
            "responses": _Api(
                parse=partial(openai_responses.parse, earlier=self._earlier),
                answer=openai_responses.answer,
                stream=openai_responses.stream,
                error=openai_chat.error,
                stream_error=openai_responses.stream_error,
                ping=_OPENAI_PING,
            ),
            "messages": _Api(
                parse=anthropic_messages.parse,
                answer=anthropic_messages.answer,
                stream=anthropic_messages.stream,
                error=anthropic_messages.error,
                stream_error=anthropic_messages.stream_error,
                ping=_ANTHROPIC_PING,
            ),
        }

    @property
    def retries_joined(self) -> int:
        return self._retries.joined

    async def handle(self, request: Request) -> Response:
        """Answer one request; errors are answers too, in the format of the endpoint that was asked."""
        path = request.path.partition("?")[0].strip("/").removeprefix("v1").strip("/")
        anthropic = path.startswith("messages") or "anthropic-version" in request.headers
        error = anthropic_messages.error if anthropic else openai_chat.error
        try:
            self._check_key(request)
            api = self._apis.get(path)
            if api is not None and request.method == "POST":
                return await self._sampled(api, path, request)
            if path == "messages/count_tokens" and request.method == "POST":
                ask = anthropic_messages.parse(_body(request), counting=True)
                return _json(200, {"input_tokens": self.model.count_tokens(ask)})
            if request.method == "GET" and path.partition("/")[0] == "models":
                return self._models(path.partition("/")[2], anthropic=anthropic)
            if api is not None or path == "messages/count_tokens":
                raise Refusal(f"{request.method} is not allowed here; use POST.", status=405, code="method")
            raise Refusal(
                f"There is no {request.method} /{path}. Known: {', '.join(self._apis)}, models.",
                status=404,
                kind="not_found_error",
                code="not_found",
            )
        except Refusal as refusal:
            return refused(refusal, error)
        except Exception as own:  # the boundary of a session: whatever a client sends ends that request alone
            return refused(self._own(own, path), error)

    def _own(self, error: Exception, path: str) -> Refusal:
        """An error of our own as an answer; counted, and told loudly."""
        log.error("a request to /%s ended by an error of our own", path, exc_info=error)
        internal = Refusal(
            f"The proxy failed on this request: {type(error).__name__}.",
            status=500,
            kind="api_error",
            code="internal",
        )
        self.model.note_refused(internal)
        return internal

    def _check_key(self, request: Request) -> None:
        """Any of the ways in which clients send a key: some send both, one of them a placeholder."""
        if self._key is None:
            return
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        sent = [request.headers.get("x-api-key", ""), bearer.strip() if kind.lower() == "bearer" else ""]
        known = self._key.encode()
        if not any(hmac.compare_digest(one.encode("utf-8", "replace"), known) for one in sent):
            raise Refusal(
                "Incorrect API key: use the one of this session.",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
            )

    async def _sampled(self, api: _Api, path: str, request: Request) -> Response:
        try:
            ask = api.parse(_body(request))
        except Refusal as refusal:
            self.model.note_refused(refusal)
            raise

        async def start() -> Answer:
            answer = await self.model.ask(ask)
            if path == "responses":
                self._keep(answer)
            return answer

        once = self._retries.once(path, request.headers, request.body, start)
        if not ask.stream:
            return _json(200, api.answer(await once))
        waiting = asyncio.ensure_future(once)
        try:
            await asyncio.wait({waiting}, timeout=FIRST_BYTE_S)
            if waiting.done():
                events = api.stream(waiting.result())
                return Response(status=200, content_type=EVENTS, body=_at_once(events))
        except BaseException:
            waiting.cancel()
            raise
        later = _Later(api, waiting, lambda own: self._own(own, path))
        return Response(status=200, content_type=EVENTS, body=later)

    def _models(self, name: str, *, anthropic: bool) -> Response:
        model = self.model.name
        if anthropic:
            entry: dict[str, Any] = {
                "type": "model",
                "id": name or model,
                "display_name": model,
                "created_at": "1970-01-01T00:00:00Z",
            }
            listed = {"data": [entry], "has_more": False, "first_id": model, "last_id": model}
        else:
            entry = {"id": name or model, "object": "model", "created": 0, "owned_by": "agentrl"}
            listed = {"object": "list", "data": [entry]}
        return _json(200, entry if name else listed)

    # ----------------------------------------------------------------------------------------- conversations

    def _keep(self, answer: Answer) -> None:
        reply = shown(answer.choices[0])
        self._conversations[openai_responses.response_id(answer)] = openai_responses.conversation(
            answer, reply
        )
        while len(self._conversations) > KEPT_RESPONSES:
            del self._conversations[next(iter(self._conversations))]

    def _earlier(self, response_id: str) -> tuple[Message, ...]:
        found = self._conversations.get(response_id)
        if found is None:
            raise Refusal(
                f"Previous response with id '{response_id}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found


def refused(refusal: Refusal, error: Callable[[Refusal], dict[str, Any]]) -> Response:
    """A refusal as a response. Client libraries are told whether trying again is of any use."""
    again = "true" if refusal.retry else "false"
    return Response(
        status=refusal.status,
        content_type=JSON,
        body=_dumped(error(refusal)),
        headers={"x-should-retry": again},
    )


def _body(request: Request) -> Mapping[str, Any]:
    if len(request.body) > MAX_BODY_BYTES:
        raise Refusal(
            f"The request has more than {MAX_BODY_BYTES} bytes.",
            status=413,
            kind="request_too_large",
            code="request_too_large",
        )
    try:
        body = json.loads(request.body, parse_constant=_no_constant)
        if _MAYBE_HALF.search(request.body):
            body = _whole_characters(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"The body is not JSON: {error}.", code="not_json") from error
    if not isinstance(body, dict):
        raise Refusal("The body must be a JSON object.", code="not_json")
    return body


_MAYBE_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON number")


def _whole_characters(value: Any) -> Any:
    """A value whose texts are Unicode: half of a surrogate pair, as clients leave that cut texts by UTF-16
    units, becomes the replacement character, as in every encoder of the web."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {_whole_characters(name): _whole_characters(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_whole_characters(one) for one in value]
    return value


def _json(status: int, value: Mapping[str, Any]) -> Response:
    return Response(status=status, content_type=JSON, body=_dumped(value))


def _dumped(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


async def _at_once(events: Iterator[bytes]) -> AsyncIterator[bytes]:
    yield b"".join(events)


class _Later:
    """The events of a reply that is waited for, signs of life before them. Closed early, also before anybody
    looked, it gives the request up. `own`: an unexpected error as a refusal."""

    def __init__(
        self, api: _Api, waiting: asyncio.Future[Answer], own: Callable[[Exception], Refusal]
    ) -> None:
        self._api = api
        self._waiting = waiting
        self._own = own

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while not self._waiting.done():
                yield self._api.ping
                await asyncio.wait({self._waiting}, timeout=PING_S)
            try:
                events = self._api.stream(self._waiting.result())
            except Refusal as refusal:
                events = self._api.stream_error(refusal)
            except Exception as error:  # as in `Door.handle`
                events = self._api.stream_error(self._own(error))
            for event in events:
                yield event
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        if not self._waiting.done():
            self._waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._waiting
