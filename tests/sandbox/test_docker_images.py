"""Images without an engine: who is to blame for a build or a pull, what names one, what is asked once."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from saved import config, layer, layout, sha

from agentrl.errors import BoundaryError, SandboxError, TaskError
from agentrl.types import SandboxSpec
from envs.sandbox import docker_images, images
from envs.sandbox.docker_images import DockerImages
from envs.sandbox.docker_stock import SAVED
from envs.sandbox.engine import Engine, EngineRefused
from envs.sandbox.kubernetes_images import KubernetesImages
from envs.sandbox.local import LocalBackend
from envs.sandbox.plain import PlainBackend
from envs.sandbox.pressure import Pressure


@dataclass
class Lines:
    """A stream of progress records, as the engine sends them."""

    records: list[dict[str, Any]]

    async def aiter_lines(self) -> AsyncIterator[str]:
        for record in self.records:
            yield json.dumps(record)


@dataclass
class FakeEngine:
    """An engine that has some images, and answers builds and pulls as a test says."""

    have: dict[str, str] = field(default_factory=dict)
    """Id by name."""
    said: list[dict[str, Any]] = field(default_factory=list)
    refuses: EngineRefused | None = None
    limits: int = 0
    """So many pulls are answered as by a registry that asks for fewer."""
    at_once: int = 0
    most_at_once: int = 0
    asked: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    async def image(self, name: str, *, phase: str) -> dict[str, Any] | None:
        await asyncio.sleep(0)
        found = self.have.get(name) or self.have.get(name + ":latest")
        found = found or (name if name in self.have.values() else None)
        return None if found is None else {"Id": found, "Config": {"Env": ["A=1", "PATH=/x"]}}

    @asynccontextmanager
    async def stream(
        self, method: str, route: str, *, params: Mapping[str, str], content: Any, **_: Any
    ) -> AsyncIterator[Lines]:
        data = b"".join([piece async for piece in content]) if content is not None else b""
        self.asked.append((route, params))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        if self.limits > 0:
            self.limits -= 1
            yield Lines([{"error": "toomanyrequests: You have reached your pull rate limit."}])
            return
        if self.refuses is not None:
            raise self.refuses
        if not any("error" in record for record in self.said):
            name = (
                loaded(data)
                if route == "/images/load"
                else params.get("t") or f"{params['fromImage']}:{params['tag']}".replace(":sha256", "@sha256")
            )
            self.have[name] = f"sha256:{len(self.have):064x}"
        yield Lines(self.said)

    async def call(self, method: str, route: str, **_: Any) -> Any:
        if route.endswith("/wait"):
            return {"StatusCode": 0}
        return {"Id": "probe"}

    async def remove(self, name: str, *, deadline_s: float) -> str:
        return "removed"


def loaded(data: bytes) -> str:
    """The tag of the image in what `docker save` writes; it has to be whole."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    (image,) = json.loads(files["manifest.json"])
    assert image["Config"] == f"{sha(files[image['Config']])}.json"
    stated = json.loads(files[image["Config"]])["rootfs"]["diff_ids"]
    assert [f"sha256:{sha(files[name])}" for name in image["Layers"]] == stated
    (tag,) = image["RepoTags"]
    return str(tag)


def made(engine: FakeEngine, root: Path, base: str = "base:1") -> DockerImages:
    return DockerImages(cast(Engine, engine), root, owner=None, base_image=base, pressure=Pressure(2))


def recipe(folder: Path, text: str = "FROM base:1\nRUN make\n") -> str:
    folder.mkdir()
    (folder / "Dockerfile").write_text(text)
    return str(folder)


RAN = {"code": 1, "message": "The command '/bin/sh -c make' returned a non-zero code: 1"}
BUILDS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "a command of the recipe failed": (
        "task",
        [{"stream": "no rule to make target"}, {"error": RAN["message"], "errorDetail": RAN}],
    ),
    "a file of the recipe is not there": (
        "task",
        [{"error": "COPY failed: file not found in build context: stat src: file does not exist"}],
    ),
    "the registry of its base refuses": (
        "environment",
        [{"error": "toomanyrequests: You have reached your pull rate limit.", "errorDetail": {}}],
    ),
    "the disk is full": (
        "environment",
        [{"error": "write /var/lib/docker/tmp/layer: no space left on device"}],
    ),
    "the engine went away": ("environment", [{"error": "context canceled", "errorDetail": {"message": ""}}]),
    "words of the recipe's own are not the engine's": (
        "task",
        [{"stream": "no space left on device\ntoomanyrequests"}, {"error": "x", "errorDetail": RAN}],
    ),
}


@pytest.mark.parametrize("name", BUILDS)
def test_only_the_recipe_itself_is_the_tasks_fault(tmp_path: Path, name: str) -> None:
    owner, said = BUILDS[name]

    async def check() -> None:
        engine = FakeEngine(have={"base:1": "sha256:" + "b" * 64}, said=said)
        with pytest.raises(BoundaryError) as caught:
            await made(engine, tmp_path).prepare(recipe(tmp_path / "environment"))
        assert (caught.value.owner, caught.value.retryable) == (owner, owner == "environment")
        assert caught.value.fix

    asyncio.run(check())


@pytest.mark.parametrize(("status", "owner"), [(400, "task"), (500, "environment"), (503, "environment")])
def test_a_build_that_is_refused_as_a_whole_says_by_its_status_whose_fault_it_is(
    tmp_path: Path, status: int, owner: str
) -> None:
    async def check() -> None:
        engine = FakeEngine(refuses=EngineRefused("Docker: no", status=status, phase="build"))
        with pytest.raises(BoundaryError) as caught:
            await made(engine, tmp_path).prepare(recipe(tmp_path / "environment"))
        assert caught.value.owner == owner

    asyncio.run(check())


@pytest.mark.parametrize(
    ("name", "pulled"),
    [
        ("debian:12", {"fromImage": "debian", "tag": "12"}),
        ("debian", {"fromImage": "debian", "tag": "latest"}),
        ("reg.example:5000/a/b", {"fromImage": "reg.example:5000/a/b", "tag": "latest"}),
        ("reg.example:5000/a/b:v1", {"fromImage": "reg.example:5000/a/b", "tag": "v1"}),
        ("a/b@sha256:" + "0" * 64, {"fromImage": "a/b", "tag": "sha256:" + "0" * 64}),
    ],
)
def test_an_image_that_a_task_names_is_pulled_once_and_known_by_its_id(
    tmp_path: Path, name: str, pulled: dict[str, str]
) -> None:
    async def check() -> None:
        engine = FakeEngine()
        known = made(engine, tmp_path)
        digests = await asyncio.gather(*(known.prepare(name) for _ in range(16)))
        assert [where for _, where in engine.asked] == [pulled]
        (digest,) = set(digests)
        prepared = await known.require(digest)
        assert prepared.image_id == "sha256:" + digest.removeprefix("image:")
        assert (prepared.files, prepared.env, prepared.path) == (False, {"A": "1"}, "/x")
        # Another process finds the note; when the engine has lost the image, it is pulled again.
        assert await made(engine, tmp_path).require(digest) == prepared
        engine.have.clear()
        known.forget(digest)
        with pytest.raises(SandboxError) as caught:
            await known.require(digest)
        assert caught.value.code == "image_unknown"

    asyncio.run(check())


def test_a_registry_that_refuses_is_the_environments_fault(tmp_path: Path) -> None:
    async def check() -> None:
        for engine in (
            FakeEngine(said=[{"error": "unauthorized: authentication required"}]),
            FakeEngine(refuses=EngineRefused("Docker: no such host", status=500, phase="pull")),
        ):
            with pytest.raises(SandboxError) as caught:
                await made(engine, tmp_path).prepare("debian:12")
            assert (caught.value.code, caught.value.owner) == ("pull_failed", "environment")
            assert caught.value.retryable

    asyncio.run(check())


NO_NAMES = [
    "../containers/json",
    "a/../../b",
    "a b",
    "a?x=1",
    "a%2fb",
    "a#b",
    "",
    "a\0b",
    "é",
    "-a",
    "a:b:c",
    "a" * 600,
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_is_no_name_never_reaches_the_engine(tmp_path: Path, name: str) -> None:
    async def check() -> None:
        engine = FakeEngine()
        for backend in (
            made(engine, tmp_path),
            KubernetesImages(tmp_path, base_image=None, shares_engine=never),
        ):
            with pytest.raises(TaskError) as caught:
                await backend.prepare(name)
            assert caught.value.code == "bad_image"
        assert engine.asked == []

    asyncio.run(check())


def test_an_image_on_this_machines_disk_is_loaded_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    layers = [layer({"bin/bash": "x"}), layer({"a": "1"})]
    digest = f"oci:{sha(config(layers))}"

    async def check() -> None:
        engine = FakeEngine()
        known = made(engine, tmp_path / "state")
        wanted = f"oci:{layout(tmp_path / 'l', layers)}"
        for one in (known, known, made(engine, tmp_path / "state"), made(engine, tmp_path / "other")):
            assert await asyncio.gather(*(one.prepare(wanted) for _ in range(3))) == [digest] * 3
            assert (await one.require(digest)).image_id == engine.have[SAVED + digest[4:]]
        assert [route for route, _ in engine.asked] == ["/images/load"]
        (tmp_path / "l" / "blobs" / "sha256" / sha(layers[1])).write_bytes(b"other")
        empty = FakeEngine()
        with pytest.raises(TaskError, match="layer 2 of 2") as caught:
            await made(empty, tmp_path / "third").prepare(wanted)
        assert (caught.value.code, empty.asked) == ("bad_image", [])

    asyncio.run(check())


async def never() -> bool:
    return False


def test_where_no_images_run_a_named_one_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async def check() -> None:
        for backend in (PlainBackend(tmp_path / "plain"), LocalBackend(tmp_path / "local")):
            with pytest.raises(TaskError, match="docker or kubernetes") as caught:
                await backend.prepare("debian:12")
            assert caught.value.code == "image_unsupported"
            await backend.close()

    asyncio.run(check())


def test_a_cluster_is_told_the_name(tmp_path: Path) -> None:
    async def check() -> None:
        known = KubernetesImages(tmp_path, base_image=None, shares_engine=never)
        digest = await known.prepare("debian:12")
        for one in (known, KubernetesImages(tmp_path, base_image=None, shares_engine=never)):
            prepared = await one.require(digest)
            assert (prepared.image, prepared.files) == ("debian:12", False)
            assert (await one.archive(digest, prepared, ())).path is None
        assert await known.prepare("debian:13") != digest

    asyncio.run(check())


def test_on_a_disk_that_is_nearly_full_nothing_is_copied_and_what_is_there_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        for name in ("old", "new"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "a.py").write_text(f"a = '{name}'\n")
        backend = PlainBackend(tmp_path / "state")
        old = await backend.prepare(str(tmp_path / "old"))
        facts = os.statvfs(tmp_path)
        free = facts.f_bavail * facts.f_frsize
        monkeypatch.setattr(images, "LOW_BYTES", free * 2)
        with pytest.raises(SandboxError) as caught:
            await backend.prepare(str(tmp_path / "new"))
        assert (caught.value.code, caught.value.owner, caught.value.retryable) == (
            *("disk_pressure", "environment"),
            True,
        )
        assert "MiB left" in (LocalBackend(tmp_path / "state").short_of() or "")
        assert await backend.prepare(str(tmp_path / "old")) == old
        box = await backend.create(SandboxSpec(image=old), image=old, session="s")
        assert await box.read_file("a.py") == b"a = 'old'\n"
        monkeypatch.setattr(images, "LOW_BYTES", 0)
        await backend.prepare(str(tmp_path / "new"))
        assert LocalBackend(tmp_path / "state").short_of() is None
        await backend.close()

    asyncio.run(check())


def test_however_many_images_are_wanted_few_are_pulled_at_once_and_each_once(tmp_path: Path) -> None:
    async def check() -> None:
        engine = FakeEngine()
        known = made(engine, tmp_path)
        await asyncio.gather(*(known.prepare(f"debian:{number % 8}") for number in range(64)))
        assert sorted(where["tag"] for _, where in engine.asked) == [str(number) for number in range(8)]
        assert engine.most_at_once == 3

    asyncio.run(check())


def test_a_registry_that_asks_for_fewer_pulls_is_waited_for_and_named_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_images, "LIMITED_PAUSE_S", 0.01)

    async def check() -> None:
        engine = FakeEngine(limits=3)
        assert (await made(engine, tmp_path).prepare("debian:12")).startswith("image:")
        assert len(engine.asked) == 4
        monkeypatch.setattr(docker_images, "LIMITED_PATIENCE_S", 0.1)
        engine = FakeEngine(limits=10**6)
        with pytest.raises(SandboxError, match="pull rate limit") as caught:
            await made(engine, tmp_path / "other").prepare("debian:12")
        assert (caught.value.owner, caught.value.code) == ("environment", "pull_limited")
        assert caught.value.retryable
        assert "mirror" in str(caught.value.fix)
        assert 2 <= len(engine.asked) <= 5, "the pauses grow"

    asyncio.run(check())


def test_a_full_disk_of_the_engine_is_its_own_and_what_a_recipe_says_of_one_is_the_recipes(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "Dockerfile").write_text("FROM base:1\nRUN make\n")
    full = {"error": "write /blob: no space left on device"}
    ran = {"error": "make: No space left on device", "errorDetail": {"code": 2}}
    saved = f"oci:{layout(tmp_path / 'l', [layer({'bin/bash': 'x'})])}"

    async def check() -> None:
        for wanted, said, code, owner in (
            ("debian:12", full, "disk_pressure", "environment"),
            (str(folder), full, "disk_pressure", "environment"),
            (saved, full, "disk_pressure", "environment"),
            (str(folder), ran, "build_failed", "task"),
        ):
            engine = FakeEngine(have={"base:1": "sha256:b"}, said=[said])
            with pytest.raises(BoundaryError) as caught:
                await made(engine, tmp_path / "state").prepare(wanted)
            assert (caught.value.code, caught.value.owner) == (code, owner)
            assert caught.value.retryable is (owner == "environment")

    asyncio.run(check())
