"""What is kept so that sandboxes can be made of it: nothing that anybody needs is ever removed, and a disk
that fills up is given room by what nobody does."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
from disks import aged, fill
from saved import BASH, layer, layout

from agentrl.errors import SandboxError
from agentrl.types import SandboxSpec
from envs.sandbox import images, room, shelf
from envs.sandbox.contract import ExecRequest, Sandbox, StockItem
from envs.sandbox.docker_stock import BASE, BUILT, ENGINES, Brought
from envs.sandbox.engine import Engine, EngineRefused
from envs.sandbox.local import KEPT, LocalBackend
from envs.sandbox.room import FRESH_S, Room, chosen
from envs.sandbox.shelf import NOTE, Shelf, held_while, size_of

pytestmark = pytest.mark.sandbox
HOUR = 3600.0


def item(name: str, *, age_s: float, users: int = 0, size: int = 10) -> StockItem:
    used_at = 1e9 - age_s
    return StockItem(id=name, kind="workspace", bytes=size, used_at=used_at, users=users, place="/")


# ----------------------------------------------------------------------------------------- what may be let go


def test_the_longest_unused_goes_first_and_only_as_much_as_is_asked_for() -> None:
    items = [
        item("new", age_s=HOUR),
        item("old", age_s=9 * HOUR),
        item("older", age_s=99 * HOUR),
        item("needed", age_s=999 * HOUR, users=1),
        item("fresh", age_s=FRESH_S - 1),
    ]

    def names(**how: Any) -> list[str]:
        return [each.id for each in chosen(items, now=1e9, **how)]

    assert names(older_s=0) == ["older", "old", "new"]
    assert names(older_s=2 * HOUR) == ["older", "old"]
    assert names(older_s=0, keep_bytes=35) == ["older", "old"], "50 bytes, then 40, then 30"
    assert names(older_s=0, keep_bytes=50) == []
    assert names(older_s=0, keep_bytes=0) == ["older", "old", "new"]


# ------------------------------------------------------------------------------------------------- the shelf


def a_thing(state: Path, name: str = "dir-1", *, age_s: float = 0.0) -> Path:
    """Whole, or not there."""
    thing, making = state / "images" / name, state / "images" / f".making-{name}"
    making.mkdir(parents=True)
    (making / "file").write_text("x" * 5000)
    making.rename(thing)
    if age_s:
        aged(state, thing, age_s)
    return thing


def test_what_a_note_names_stays_for_as_long_as_the_note_does(tmp_path: Path) -> None:
    kept = Shelf(tmp_path, KEPT, counts=lambda _: True)
    thing, other = a_thing(tmp_path), a_thing(tmp_path, "dir-2")
    note = tmp_path / "run" / "backend" / f"box{NOTE}"
    note.parent.mkdir(parents=True)
    assert kept.use(note, [thing])
    for each in (thing, other):
        aged(tmp_path, each, HOUR)
    assert {each.id: each.users for each in kept.stock(sizes=False)} == {"images/dir-1": 1, "images/dir-2": 0}
    assert not kept.discard("images/dir-1", unused_s=0)
    assert kept.discard("images/dir-2", unused_s=0)
    assert (thing.is_dir(), other.exists()) == (True, False)
    kept.ended(note)
    assert not kept.discard("images/dir-1", unused_s=60), "it was in use until now"
    assert kept.discard("images/dir-1", unused_s=0)
    assert not kept.use(note, [thing])
    assert not note.exists()
    assert not kept.touch_all([thing])
    assert not kept.discard("images/dir-1", unused_s=0)
    assert list((tmp_path / "images").iterdir()) == []
    assert {path.name for path in (tmp_path / "used").rglob("*") if path.is_file()} == {".lock", ".gate"}


def test_notes_of_a_backend_that_nobody_runs_count_for_nothing(tmp_path: Path) -> None:
    thing = a_thing(tmp_path)
    for name, counts in (("alive", 1), ("dead", 0)):
        note = tmp_path / "run" / name / f"box{NOTE}"
        note.parent.mkdir(parents=True)
        kept = Shelf(tmp_path, KEPT, counts=lambda folder: folder.name == "alive")
        assert kept.use(note, [thing])
        (one,) = kept.stock(sizes=True)
        assert (one.users, one.bytes) == (counts, size_of(thing)) if name == "dead" else (1, size_of(thing))
        note.unlink()


def test_what_is_removed_before_it_is_held_is_made_again(tmp_path: Path) -> None:
    kept = Shelf(tmp_path, KEPT, counts=lambda _: True)
    made = 0

    async def found(removals: int) -> tuple[int, list[Path]]:
        nonlocal made
        made += 1
        thing = tmp_path / "images" / "dir-1"
        if not thing.is_dir():
            a_thing(tmp_path)
        if made <= removals:
            assert kept.discard("images/dir-1", unused_s=0)
        return made, [thing]

    assert asyncio.run(held_while(lambda: found(2), kept.touch_all)) == 3
    made = 0
    with pytest.raises(SandboxError, match="again and again") as caught:
        asyncio.run(held_while(lambda: found(99), kept.touch_all))
    assert (caught.value.code, caught.value.retryable, made) == ("images_removed", True, shelf.TAKES)


def test_of_many_that_use_and_one_that_removes_nobody_ever_holds_what_is_gone(tmp_path: Path) -> None:
    kept = Shelf(tmp_path, KEPT, counts=lambda _: True)
    (tmp_path / "run" / "b").mkdir(parents=True)
    making, held, removed = threading.Lock(), 0, 0
    wrong: list[int] = []
    over = threading.Event()

    def use(number: int) -> None:
        nonlocal held
        note = tmp_path / "run" / "b" / f"{number}{NOTE}"
        thing = tmp_path / "images" / "dir-1"
        while not over.is_set():
            with making:
                if not thing.exists():
                    a_thing(tmp_path)
            if kept.use(note, [thing]):
                held += 1
                for _ in range(5):
                    if not (thing / "file").exists():
                        wrong.append(number)
                kept.ended(note)

    users = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for each in users:
        each.start()
    until = time.monotonic() + 30
    while (removed < 10 or held < 10) and time.monotonic() < until:
        removed += kept.discard("images/dir-1", unused_s=0)
    over.set()
    for each in users:
        each.join(20)
    assert wrong == []
    assert min(removed, held) >= 10, "nobody is kept out"


def test_a_lock_that_is_not_let_go_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "LOCK_DEADLINE_S", 0.02)
    kept = Shelf(tmp_path, KEPT, counts=lambda _: True)
    thing = a_thing(tmp_path)
    with kept._locked(fcntl.LOCK_EX), pytest.raises(SandboxError, match=r"\.lock was not free"):
        kept.touch_all([thing])
    assert kept.touch_all([thing])


def test_what_was_half_made_or_half_removed_is_swept(tmp_path: Path) -> None:
    for name in (".building-old", ".building-new", ".removed-x"):
        (tmp_path / "images" / name / "deep").mkdir(parents=True)
        (tmp_path / "images" / name / "deep").chmod(0o500)
    old = time.time() - 2 * shelf.HALF_DONE_S
    os.utime(tmp_path / "images" / ".building-old", (old, old))
    assert Shelf(tmp_path, KEPT, counts=lambda _: True).stock(sizes=False) == []
    assert [path.name for path in (tmp_path / "images").iterdir()] == [".building-new"]


# ------------------------------------------------------------------------------------------ a local backend's


def environment(folder: Path, text: str, *, size: int = 0) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.txt").write_text(text)
    if size:
        (folder / "large").write_bytes(os.urandom(size))
    return str(folder)


async def a_box(backend: LocalBackend, image: str) -> Sandbox:
    spec = SandboxSpec(image=image, memory_mib=64, disk_mib=8, pids=32)
    return await backend.create(spec, image=image, session="s")


async def said(box: Sandbox, command: str) -> str:
    result = await box.exec(ExecRequest(exec_id=os.urandom(8).hex(), command=command))
    return result.stdout.text()


def test_the_image_of_a_sandbox_is_needed_until_it_ends_and_can_be_made_again(
    backend: LocalBackend, tmp_path: Path
) -> None:
    async def run() -> None:
        wanted = environment(tmp_path / "e", "hello")
        assert not await backend.has(wanted)
        image = await backend.prepare(wanted)
        assert await backend.has(wanted)
        box = await a_box(backend, image)
        other = LocalBackend(tmp_path / "state")  # as another process sees it
        (one,) = await other.stock(sizes=True)
        assert (one.users, one.kind) == (1, "workspace")
        assert not await other.discard(one, unused_s=0)
        assert await said(box, "cat a.txt") == "hello"
        await box.close()
        (one,) = await other.stock(sizes=True)
        assert one.users == 0
        aged(tmp_path / "state", tmp_path / "state" / one.id, HOUR)
        await backend.prepare(wanted)
        assert not await other.discard(one, unused_s=60), "it was asked for just now"
        assert await other.discard(one, unused_s=0)
        assert await other.stock(sizes=True) == ()
        with pytest.raises(SandboxError) as caught:
            await a_box(backend, image)
        assert caught.value.code == "image_unknown"
        again = await a_box(backend, await backend.prepare(wanted))
        assert await said(again, "cat a.txt") == "hello"
        await again.close()
        await backend.close()
        assert not list((tmp_path / "state" / "run").glob(f"*/*{NOTE}"))

    asyncio.run(run())


ABANDONED = """
import asyncio, sys
from pathlib import Path
from agentrl.types import SandboxSpec
from envs.sandbox.local import LocalBackend

async def run():
    backend = LocalBackend(Path(sys.argv[1]))
    backend.outlive("me")
    image = await backend.prepare(sys.argv[2])
    spec = SandboxSpec(image=image, memory_mib=64, disk_mib=8, pids=32)
    await backend.create(spec, image=image, session="s")
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(run())
"""


def test_a_sandbox_whose_process_was_killed_needs_its_image_until_whoever_adopts_it_ends_it(
    backend: LocalBackend, tmp_path: Path
) -> None:
    wanted = environment(tmp_path / "e", "hello")
    words = [sys.executable, "-c", ABANDONED, str(tmp_path / "state"), wanted]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.kill()

    async def run() -> None:
        (one,) = await backend.stock(sizes=False)
        assert one.users == 1
        assert not await backend.discard(one, unused_s=0)
        backend.outlive("me")
        box = await backend.adopt("s")
        assert box is not None
        assert await said(box, "cat a.txt") == "hello"
        assert not await backend.discard(one, unused_s=0)
        await box.close()
        assert await backend.discard(one, unused_s=0)
        await backend.close()

    asyncio.run(run())


def test_an_unpacked_image_is_one_thing_and_what_is_in_use_of_it_another(tmp_path: Path) -> None:
    async def run() -> None:
        backend = LocalBackend(tmp_path / "state")
        wanted = f"oci:{layout(tmp_path / 'l', [layer(BASH)])}"
        assert not await backend.has(wanted)
        await backend.prepare(wanted)
        assert await backend.has(wanted)
        (one,) = await backend.stock(sizes=True)
        assert (one.kind, one.users) == ("system", 0)
        assert await backend.discard(one, unused_s=0)
        assert not await backend.has(wanted)
        await backend.prepare(wanted)
        await backend.close()

    asyncio.run(run())


# --------------------------------------------------------------------------------------- a disk that fills up


def test_a_full_disk_refuses_new_sandboxes_and_what_nobody_uses_makes_room_for_them(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = small_disk / "state"
    backend = LocalBackend(state)
    try:
        backend.check()
    except SandboxError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(room, "AGAIN_S", 0.0)

    async def run() -> None:
        lives = await backend.prepare(environment(tmp_path / "lives", "alive", size=1 << 20))
        box = await a_box(backend, lives)
        unused = [
            await backend.prepare(environment(tmp_path / f"e{n}", f"{n}", size=6 << 20)) for n in range(3)
        ]
        new = environment(tmp_path / "new", "new", size=1 << 20)
        assert backend.short_of() is None
        mine = fill(small_disk, free_mib=1.5)
        assert "MiB left" in (backend.short_of() or "")
        for refused in (a_box(backend, lives), backend.prepare(new)):
            with pytest.raises(SandboxError) as caught:  # what was just asked for is not let go
                await refused
            assert (caught.value.code, caught.value.owner) == ("disk_pressure", "environment")
            assert caught.value.retryable
        assert await said(box, "cat a.txt; echo more > b.txt; cat b.txt") == "alivemore\n"
        for number, name in enumerate([lives, *unused]):
            aged(state, state / "images" / name.replace(":", "-"), 4 * HOUR - 60 * number)
        made = await backend.prepare(new)
        another = await a_box(backend, made)
        assert await said(another, "cat a.txt") == "new"
        assert backend._room.freed == 3, "until half as much again as should stay free is"
        left = {each.id: each.users for each in await backend.stock(sizes=False)}
        assert left == {f"images/{name.replace(':', '-')}": 1 for name in (lives, made)}
        assert backend.short_of() is None
        assert await said(box, "cat a.txt b.txt") == "alivemore\n"
        mine.unlink()
        for each in (box, another):
            await each.close()
        await backend.close()

    asyncio.run(run())


def test_room_is_made_before_it_is_needed_and_no_more_than_that(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free: 48 MiB less what is there; at 12 free, one thing of 6 MiB and then another make 24."""
    state = small_disk / "state"

    async def run() -> None:
        backend = LocalBackend(state)
        names = [
            await backend.prepare(environment(tmp_path / f"e{n}", f"{n}", size=6 << 20)) for n in range(4)
        ]
        for number, name in enumerate(names):
            aged(state, state / "images" / name.replace(":", "-"), 9 * HOUR - 60 * number)
        fill(small_disk, free_mib=12)
        assert backend.short_of() is None, "it only begins to make room"
        async with asyncio.timeout(20):
            while backend._room.freed < 2:  # noqa: ASYNC110  (a test looks from outside)
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        left = [each.id for each in await backend.stock(sizes=False)]
        assert left == [f"images/{name.replace(':', '-')}" for name in names[2:]]
        await backend.close()

    asyncio.run(run())


def test_where_nothing_can_be_let_go_nobody_looks_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        asked = 0

        async def stock(self, *, sizes: bool) -> tuple[StockItem, ...]:
            self.asked += 1
            return (item("needed", age_s=HOUR, users=1),)

        async def discard(self, item: StockItem, *, unused_s: float) -> bool:
            raise AssertionError("it is needed")

    monkeypatch.setattr(images, "LOW_BYTES", 1 << 60)

    async def run() -> None:
        full = Full()
        one = Room(full, lambda: (Path("/"),))
        for _ in range(20):
            assert one.short_of() is not None
            await asyncio.sleep(0.001)
        assert full.asked == 1
        with pytest.raises(SandboxError, match="MiB left"):
            await one.for_sandbox()
        await one.close()

    asyncio.run(run())


def test_an_image_that_takes_more_than_should_stay_free_is_given_more_until_nothing_can_be_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 1000, 100 should stay free, and 160 are; each thing gives 50 back."""
    free = 160

    class Shelves:
        def __init__(self, things: int) -> None:
            self.have = [item(str(number), age_s=time.time()) for number in range(things)]

        async def stock(self, *, sizes: bool) -> tuple[StockItem, ...]:
            return tuple(self.have)

        async def discard(self, item: StockItem, *, unused_s: float) -> bool:
            nonlocal free
            self.have.remove(item)
            free += 50
            return True

    monkeypatch.setattr(room, "free_bytes", lambda _: (free, 1000))
    monkeypatch.setattr(room, "spare_bytes", lambda _: 100)

    async def takes(much: int) -> int:
        await asyncio.sleep(0)
        if free < much:
            raise SandboxError("The engine's disk is full.", code="disk_pressure", phase="prepare")
        return free

    async def run() -> None:
        nonlocal free
        one = Room(Shelves(20), lambda: (Path("/"),))
        assert await one.making(lambda: takes(160)) == 160
        assert await one.making(lambda: takes(300)) == 310, "to 300: three times what should stay free"
        free = 160
        assert await one.making(lambda: takes(400)) == 460
        free = 160
        with pytest.raises(SandboxError, match="disk is full"):
            await one.making(lambda: takes(4000))
        assert len(Shelves(0).have) == 0
        await one.close()

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------ an engine's


class Shelved:
    """An engine's images: what it is asked to forget, and when they were tagged."""

    def __init__(self) -> None:
        self.have: dict[str, dict[str, Any]] = {}
        self.needed: set[str] = set()
        self.asked: list[str] = []

    def put(self, name: str, number: int, *, tagged: str = "0001-01-01T00:00:00Z") -> str:
        image_id = f"sha256:{number:064x}"
        self.have[name] = {"Id": image_id, "Size": 7, "Metadata": {"LastTagTime": tagged}}
        self.have[name]["Created"] = "2020-01-01T00:00:00.123456789Z"
        return image_id

    def _row(self, image_id: str) -> list[str]:
        return [name for name, facts in self.have.items() if facts["Id"] == image_id]

    async def image(self, name: str, *, phase: str) -> dict[str, Any] | None:
        names = self._row(name) or ([name] if name in self.have else [])
        return {**self.have[names[0]], "RepoTags": names} if names else None

    async def containers(self, labels: Any, **_: Any) -> list[dict[str, Any]]:
        assert labels == {}
        return [{"ImageID": image_id} for image_id in self.needed]

    async def call(self, method: str, route: str, *, params: Any = None, **_: Any) -> Any:
        self.asked.append(f"{method} {route}")
        if route == "/images/json":
            prefixes = [word.removesuffix("*") for word in json.loads(params["filters"])["reference"]]
            ours = [n for n in self.have if any(n.startswith(prefix) for prefix in prefixes)]
            return [{"Id": self.have[name]["Id"], "RepoTags": [name]} for name in ours]
        if method == "DELETE":
            name = route.removeprefix("/images/")
            if self.have[name]["Id"] in self.needed and len(self._row(self.have[name]["Id"])) == 1:
                raise EngineRefused("in use", status=409, phase="remove")
            del self.have[name]
        elif route.endswith("/tag"):
            now = time.strftime("%Y-%m-%dT%H:%M:%S.123456789Z", time.gmtime())
            self.have[f"{params['repo']}:{params['tag']}"]["Metadata"]["LastTagTime"] = now
        return None


def test_of_an_engine_only_what_this_program_brought_is_ever_looked_at_or_removed(tmp_path: Path) -> None:
    engine = Shelved()
    brought = Brought(cast(Engine, engine), tmp_path)
    built = engine.put(BUILT + "a", 1, tagged="2021-05-05T10:00:00+02:00")
    base = engine.put(BASE + "b", 2)
    engine.put("users/own:1", 3)
    pulled = engine.put("task/image:1", 4)
    brought.pulled("task/image:1", pulled)
    other = engine.put("task/moved:1", 5)
    brought.pulled("task/moved:1", other)
    engine.put("task/moved:1", 6)  # somebody else has pulled another one of that name
    os.utime(tmp_path / "pulled" / f"{4:064x}.json", (1e9, 1e9))
    engine.needed.add(base)

    async def run() -> None:
        found = {each.id.removeprefix(ENGINES): each for each in await brought.stock(tmp_path)}
        assert {name: (each.kind, each.users) for name, each in found.items()} == {
            BUILT + "a": ("built", 0),
            BASE + "b": ("base", 1),
            "task/image:1": ("pulled", 0),
        }
        assert found["task/image:1"].used_at == 1e9
        assert found[BUILT + "a"].used_at == 1620201600.0
        assert found[BASE + "b"].used_at == pytest.approx(1577836800.123456)
        await brought.used(built)
        await brought.used(pulled)
        assert not await brought.discard(found[BUILT + "a"], unused_s=HOUR), "it was asked for just now"
        assert not await brought.discard(found["task/image:1"], unused_s=HOUR)
        assert not await brought.discard(found[BASE + "b"], unused_s=HOUR), "a container needs it"
        for name in (BUILT + "a", "task/image:1"):
            assert await brought.discard(found[name], unused_s=0)
        assert sorted(engine.have) == [BASE + "b", "task/moved:1", "users/own:1"]
        theirs = item(ENGINES + "users/own:1", age_s=HOUR)
        assert not await brought.discard(theirs, unused_s=0)
        assert not await brought.discard(item(ENGINES + "task/moved:1", age_s=HOUR), unused_s=0)

    asyncio.run(run())
    touched = [line for line in engine.asked if line.startswith(("DELETE", "POST"))]
    assert touched == [
        f"POST /images/{built}/tag",
        f"DELETE /images/{BASE}b",
        f"DELETE /images/{BUILT}a",
        "DELETE /images/task/image:1",
    ]


def test_an_image_is_marked_as_used_now_and_then_and_a_lost_mark_is_no_error(tmp_path: Path) -> None:
    engine = Shelved()
    brought = Brought(cast(Engine, engine), tmp_path)
    built = engine.put(BUILT + "a", 1)

    async def run() -> None:
        for _ in range(5):
            await brought.used(built)
        assert engine.asked == [f"POST /images/{built}/tag"]

        async def gone(*_: Any, **__: Any) -> Any:
            raise SandboxError("no engine")

        broken = Brought(cast(Engine, engine), tmp_path)
        engine.call = gone  # type: ignore[method-assign]
        await broken.used(built)

    asyncio.run(run())
