"""Images that this program brought to an engine: built, loaded, imported as a base, or pulled; when they were
last asked for, and their removal.

Those of the first three kinds carry a tag of this program's own, and when it was last set says to every state
folder when somebody asked for the image: `used` sets it again. What was pulled has its user's name; that we
did it is written down below `root`, and holds for as long as the name stands for that same image. No other
image is looked at, ever. The engine itself refuses to remove what a container needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from agentrl.errors import SandboxError
from envs.sandbox.contract import StockItem, StockKind
from envs.sandbox.engine import Engine, EngineRefused
from envs.sandbox.shelf import unused_for

BASE, BUILT, SAVED = "agentrl/base:", "agentrl/environment:", "agentrl/image:"
"""How the tags begin of images that were imported from this machine's own programs, built from a Dockerfile,
loaded from this machine's disk."""
ENGINES = "engine:"
"""How the ids of an engine's images begin among the things that are kept."""
MARK_EVERY_S = 300.0
"""An image is not marked as used more often."""
ASK_DEADLINE_S = 30.0
REMOVE_DEADLINE_S = 120.0
_KINDS: dict[str, StockKind] = {BASE: "base", BUILT: "built", SAVED: "loaded"}


class Brought:
    """Of one engine, with notes below `root`: one for each image that was pulled, by its id."""

    def __init__(self, engine: Engine, root: Path) -> None:
        self._engine = engine
        self._pulls = root / "pulled"
        self._marked: dict[str, float] = {}

    def pulled(self, name: str, image_id: str) -> None:
        """Write down that this program pulled an image that the engine did not have. Blocks for a moment."""
        self._pulls.mkdir(parents=True, exist_ok=True)
        names = sorted({name, *self._pulled_as(image_id)})
        replace_file(self._note(image_id), json.dumps({"id": image_id, "names": names}).encode())

    async def used(self, image_id: str) -> None:
        """Somebody asks for it now. Never raises: what is lost is a mark."""
        now = time.monotonic()
        if now - self._marked.get(image_id, float("-inf")) < MARK_EVERY_S:
            return
        self._marked[image_id] = now
        with contextlib.suppress(OSError):
            os.utime(self._note(image_id))
        with contextlib.suppress(SandboxError):
            facts = await self._engine.image(image_id, phase="prepare")
            for tag in (facts or {}).get("RepoTags") or ():
                repository, _, version = tag.rpartition(":")
                if _kind(tag) is not None:
                    await self._engine.call(
                        "POST",
                        f"/images/{image_id}/tag",
                        phase="tag",
                        deadline_s=ASK_DEADLINE_S,
                        params={"repo": repository, "tag": version},
                    )

    async def stock(self, place: Path) -> list[StockItem]:
        """All of them; `place` is a folder on the engine's disk. Raises `SandboxError` for an engine that
        does not answer."""
        users: Counter[str] = Counter()
        for facts in await self._engine.containers({}):
            users[str(facts.get("ImageID"))] += 1
        wanted = json.dumps({"reference": [prefix + "*" for prefix in _KINDS]})
        rows = await self._engine.call(
            "GET", "/images/json", phase="list", deadline_s=ASK_DEADLINE_S, params={"filters": wanted}
        )
        names = [tag for row in rows or () for tag in row.get("RepoTags") or () if _kind(tag) is not None]
        for note in await asyncio.to_thread(lambda: list(self._pulls.glob("*.json"))):
            names += self._pulled_as("sha256:" + note.stem)
        found = []
        for name in dict.fromkeys(names):
            image = await self._named(name)
            if image is not None:
                found.append(
                    StockItem(
                        id=ENGINES + name,
                        kind=_kind(name) or "pulled",
                        bytes=int(image.get("Size") or 0),
                        used_at=self._used_at(image),
                        users=users[str(image["Id"])],
                        place=str(place),
                    )
                )
        return found

    async def discard(self, item: StockItem, *, unused_s: float) -> bool:
        """Take its name from it, and with the last name the image goes. False: it stays."""
        name = item.id.removeprefix(ENGINES)
        image = await self._named(name)
        if image is None or unused_for(self._used_at(image)) < unused_s:
            return False
        try:
            await self._engine.call("DELETE", f"/images/{name}", phase="remove", deadline_s=REMOVE_DEADLINE_S)
        except EngineRefused as refused:
            if refused.status in (404, 409):  # Gone, or a container needs it, running or not.
                return False
            raise
        self._marked.pop(str(image["Id"]), None)
        if _kind(name) is None:
            self._note(image["Id"]).unlink(missing_ok=True)
        return True

    # -- inside

    async def _named(self, name: str) -> dict[str, Any] | None:
        """What the engine knows of an image by its name, if it is one that this program brought: a name may
        by now be another image's, which somebody else pulled."""
        image = await self._engine.image(name, phase="list")
        if image is None or (_kind(name) is None and name not in self._pulled_as(image["Id"])):
            return None
        return image

    def _note(self, image_id: str) -> Path:
        return self._pulls / (image_id.removeprefix("sha256:") + ".json")

    def _pulled_as(self, image_id: str) -> list[str]:
        """The names under which this program pulled it."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return [str(name) for name in json.loads(self._note(image_id).read_bytes())["names"]]
        return []

    def _used_at(self, image: dict[str, Any]) -> float:
        times = [_seconds((image.get("Metadata") or {}).get("LastTagTime"))]
        with contextlib.suppress(OSError):
            times.append(self._note(image["Id"]).lstat().st_mtime)
        return max(times) or _seconds(image.get("Created"))


def _kind(tag: str) -> StockKind | None:
    """Of an image with a tag of this program's own; None for any other."""
    return next((kind for prefix, kind in _KINDS.items() if tag.startswith(prefix)), None)


def _seconds(moment: object) -> float:
    """Of a time as engines write it; 0 for none."""
    with contextlib.suppress(ValueError):
        return max(0.0, datetime.datetime.fromisoformat(str(moment)).timestamp())
    return 0.0


def replace_file(path: Path, data: bytes) -> None:
    """Write it whole, or not."""
    beside = path.with_name(f".{path.name}-{os.urandom(6).hex()}")
    beside.write_bytes(data)
    beside.chmod(0o644)
    os.rename(beside, path)
