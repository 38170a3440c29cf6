"""What a cluster says of all pods of one backend: one list and one watch, however many pods there are.

Whoever waits for a pod registers a listener and hears of every change, and of its disappearance (None). A
watch that ends, is cut or falls silent is taken up where it was; one whose version is no longer kept (410)
begins with a new list, in which pods that are missing are gone. Nobody polls a pod; who doubts the watch
(`look`) causes one list for everybody who doubts it then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from envs.sandbox.kubernetes_api import ApiRefused, ApiUnknown, Cluster, Gone

log = logging.getLogger(__name__)

Listener = Callable[[dict[str, Any] | None], None]

LASTING_S = 300
SILENCE_S = 90.0
"""The server sends a bookmark about once a minute; a watch without any is cut off somewhere."""
LIST_DEADLINE_S = 20.0
PAGE = 500
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
CALM_S = 2.0
"""A watch that ends sooner, however it ends, is not asked for again at once: a server or something between
may end each one."""
KEPT_GONE = 4096
"""Pods that are known to be gone, so that an answer that was on its way does not bring them back."""


class _Metadata(TypedDict, total=False):
    name: str
    uid: str
    resourceVersion: str
    annotations: dict[str, str]
    deletionTimestamp: str


class _Spec(TypedDict, total=False):
    nodeName: str


class _Pod(TypedDict):
    """What is read of a pod. The rest, most of it, is what we asked for ourselves and who wrote which field:
    in a list it is passed over, never made into objects."""

    metadata: _Metadata
    spec: _Spec
    status: dict[str, Any]


class _List(TypedDict):
    metadata: dict[str, Any]
    items: list[_Pod]


_POD: TypeAdapter[Any] = TypeAdapter(_Pod)
_LIST: TypeAdapter[Any] = TypeAdapter(_List)


def read_list(data: bytes) -> dict[str, Any]:
    """A page of pods. Raises ValueError for what is none."""
    listed: dict[str, Any] = _LIST.validate_json(data)
    return listed


@dataclass(slots=True)
class Counts:
    """How often, since the start."""

    lists: int = 0
    watches: int = 0
    gone: int = 0
    cuts: int = 0
    events: int = 0


class Pods:
    """Belongs to one event loop. `path` is that of the pods of one namespace."""

    def __init__(self, cluster: Cluster, path: str, selector: str, *, silence_s: float = SILENCE_S) -> None:
        self._cluster = cluster
        self._path = path
        self._selector = selector
        self._silence_s = silence_s
        self._listeners: dict[str, Listener] = {}
        self._known: dict[str, dict[str, Any]] = {}
        self._gone: dict[str, None] = {}
        """By uid, oldest first."""
        self._version = ""
        self._task: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self.counts = Counts()

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        tasks = [task for task in (self._task, self._looking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._task = self._looking = None

    def __len__(self) -> int:
        return len(self._known)

    def get(self, name: str) -> dict[str, Any] | None:
        """As it was last seen; None when it was never seen or is gone."""
        return self._known.get(name)

    def names(self) -> list[str]:
        return list(self._known)

    def listen(self, name: str, listener: Listener) -> None:
        """From now on; told at once when the pod is known."""
        self._listeners[name] = listener
        if name in self._known:
            listener(self._known[name])

    def forget(self, name: str) -> None:
        self._listeners.pop(name, None)

    def note(self, pod: dict[str, Any]) -> None:
        """What an answer of the server said of a pod."""
        self._note(_POD.validate_python(pod))

    def _note(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        if pod["metadata"].get("uid") in self._gone:
            return
        self._known[name] = pod
        listener = self._listeners.get(name)
        if listener is not None:
            listener(pod)

    def gone(self, name: str, uid: str | None = None) -> None:
        """`uid`: of the pod that is gone; else it is the one that was known by the name."""
        known = self._known.get(name)
        uid = uid or (None if known is None else known["metadata"].get("uid"))
        if uid is not None:
            self._gone[uid] = None
            if len(self._gone) > KEPT_GONE:
                del self._gone[next(iter(self._gone))]
        if known is not None and known["metadata"].get("uid") not in (uid, None):
            return  # Another pod has its name by now.
        self._known.pop(name, None)
        listener = self._listeners.get(name)
        if listener is not None:
            listener(None)

    async def look(self) -> None:
        """List now, once for all who ask meanwhile. Raises `ApiUnknown`, `ApiRefused`."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._list())
        await asyncio.shield(self._looking)

    async def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            begun = time.monotonic()
            try:
                if not self._version:
                    await self.look()
                await self._follow()
            except Gone:
                self.counts.gone += 1
                self._version = ""
            except (ApiUnknown, ApiRefused):
                self.counts.cuts += 1
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                # The boundary to what a server sends: whatever it was, nobody may be left without news.
                log.error("news of pods could not be understood, listing them again", exc_info=error)
                self.counts.cuts += 1
                self._version = ""
            if time.monotonic() - begun > CALM_S:
                pause = FIRST_PAUSE_S
                if self._version:
                    continue  # A watch that has lasted is taken up at once.
            await asyncio.sleep(pause * (1 + random.random()))
            pause = min(2 * pause, MAX_PAUSE_S)

    async def _list(self) -> None:
        before = set(self._known)
        self.counts.lists += 1
        params = {"labelSelector": self._selector, "limit": str(PAGE)}
        found: dict[str, dict[str, Any]] = {}
        while True:
            page = await self._cluster.call(
                "GET",
                self._path,
                phase="list",
                deadline_s=LIST_DEADLINE_S,
                params=params,
                read=read_list,
            )
            found.update((pod["metadata"]["name"], pod) for pod in page["items"])
            more = page["metadata"].get("continue")
            if not more:
                break
            params = {**params, "continue": more}
        for pod in found.values():
            self._note(pod)
        for name in before - set(found):
            self.gone(name)
        self._version = str(page["metadata"]["resourceVersion"])

    async def _follow(self) -> None:
        self.counts.watches += 1
        events = self._cluster.watch(
            self._path,
            version=self._version,
            selector=self._selector,
            lasting_s=LASTING_S,
            silence_s=self._silence_s,
        )
        async with contextlib.aclosing(events):
            async for event in events:
                pod = event["object"]
                self.counts.events += 1
                self._version = str(pod["metadata"]["resourceVersion"])
                if event["type"] == "DELETED":
                    self.gone(pod["metadata"]["name"], pod["metadata"].get("uid"))
                elif event["type"] in ("ADDED", "MODIFIED"):
                    self.note(pod)
