"""`images`: what backends keep on the disk so that sandboxes can be made of it, and letting go of it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

from rich.markup import escape

from agentrl.cli import output, progress
from agentrl.errors import ConfigError
from agentrl.training.events import Listener
from envs.sandbox.contract import StockItem
from envs.sandbox.docker import DockerBackend
from envs.sandbox.local import LocalBackend
from envs.sandbox.room import FRESH_S, chosen

OLD = "7d"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_GIB = 1024**3
_KEEPERS: dict[str, Callable[[Path | None], LocalBackend | DockerBackend]] = {
    "local": LocalBackend,
    "docker": DockerBackend,
}


def list_images(backend: str, state_dir: Path | None, *, as_json: bool) -> None:
    """A line per thing that is kept, and what all of it takes."""
    items = asyncio.run(_stock(_KEEPERS[backend](state_dir)))
    total = sum(item.bytes or 0 for item in items)
    if as_json:
        output.emit({"backend": backend, "bytes": total, "images": items})
        return
    _table(items)
    output.say(f"{len(items)} on {backend}, {output.size(total)}{_shared(backend)}")


def prune(
    backend: str,
    state_dir: Path | None,
    *,
    older_than: str | None,
    keep_gib: float | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Let go of what nobody needs."""
    older_s = _seconds(older_than or (OLD if keep_gib is None else "0s"))
    keep_bytes = None if keep_gib is None else int(keep_gib * _GIB)
    with progress.shown(as_json=as_json) as listener:
        gone, stayed, left = asyncio.run(
            _prune(_KEEPERS[backend](state_dir), older_s, keep_bytes, listener, dry_run=dry_run)
        )
    freed = sum(item.bytes or 0 for item in gone)
    if as_json:
        facts = {"backend": backend, "dry_run": dry_run, "bytes": freed, "removed": gone}
        output.emit(
            {**facts, "stayed": stayed, "kept": len(left), "used": sum(item.users > 0 for item in left)}
        )
        return
    _table(gone)
    did = "would be removed" if dry_run else "removed"
    used = sum(item.users > 0 for item in left)
    fresh = sum(item.users == 0 and time.time() - item.used_at < FRESH_S for item in left)
    output.say(f"{len(gone)} {did}, {output.size(freed)}{_shared(backend)}")
    output.say(f"{len(left)} kept: {used} in use, {fresh} asked for in the last {FRESH_S / 60:.0f} minutes")
    if stayed:
        output.say(f"{len(stayed)} were needed again meanwhile, and stay")


async def _stock(place: LocalBackend | DockerBackend) -> tuple[StockItem, ...]:
    try:
        return await place.stock(sizes=True)
    finally:
        await place.close()


async def _prune(
    place: LocalBackend | DockerBackend,
    older_s: float,
    keep_bytes: int | None,
    listener: Listener,
    *,
    dry_run: bool,
) -> tuple[list[StockItem], list[StockItem], list[StockItem]]:
    """What went, what was to go and stayed, and what else is kept."""
    gone: list[StockItem] = []
    stayed: list[StockItem] = []
    try:
        items = await place.stock(sizes=True)
        going = chosen(items, older_s=older_s, keep_bytes=keep_bytes, now=time.time())
        listener.begin("prune", total=len(going), unit="images")
        for item in going:
            away = dry_run or await place.discard(item, unused_s=max(older_s, FRESH_S))
            (gone if away else stayed).append(item)
            listener.advance(1)
        listener.end()
    finally:
        await place.close()
    return gone, stayed, [item for item in items if item not in going]


def _table(items: list[StockItem] | tuple[StockItem, ...]) -> None:
    output.table(
        ("image", "kind", "size", "last used", "used by"),
        [
            (item.id, item.kind, output.size(item.bytes), output.moment(item.used_at), item.users or "–")
            for item in items
        ],
        numbers=("size", "used by"),
    )


def _shared(backend: str) -> str:
    return " (layers that images share are counted for each)" if backend == "docker" else ""


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None:
        raise ConfigError(
            f"{escape(text)!r:.50} is no length of time.", fix="Write 90m, 12h or 7d: s, m, h or d."
        )
    return float(found[1]) * _UNITS[found[2]]
