"""Images on this machine's disk: what they hold is what sandboxes see, and nothing of them gets out."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gzip
import io
import json
import os
import stat
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from engines import docker, engine_or_skip
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import (
    BASH,
    HERE,
    Blobs,
    archived,
    base,
    config,
    docker_saved,
    entry,
    gzipped,
    layer,
    layout,
    link,
    sha,
)

from agentrl.errors import SandboxError, TaskError
from agentrl.types import SandboxSpec
from envs.sandbox import images, layers, oci
from envs.sandbox.conformance import KINDS, Case, Kind
from envs.sandbox.contract import Backend, ExecRequest, Sandbox
from envs.sandbox.docker import DockerBackend
from envs.sandbox.docker_stock import SAVED
from envs.sandbox.kubernetes_images import KubernetesImages
from envs.sandbox.local import LocalBackend
from envs.sandbox.oci import OciImages
from envs.sandbox.plain import PlainBackend
from envs.sandbox.tars import HEADER_BYTES, Forwards
from envs.session import image_of, prepare
from envs.tasks import archive, package

pytestmark = pytest.mark.sandbox
NAME = f"agentrl-test-saved:{os.getpid()}"

SMALL = [layer({**BASH, "app/a": "one", "app/b": "two"}), layer({"app/.wh.b": "", "app/c": "three"})]


def unpacked(where: str | Path, root: Path) -> Path:
    """The tree of an image, as this user's."""
    store = OciImages(root, None, None)
    wanted = oci.reference(str(where))
    assert wanted is not None
    return Path(store.require(asyncio.run(store.prepare(wanted))).tree)


def content(tree: Path) -> dict[str, str | None]:
    """Text of files and links by path; None: a folder."""
    found: dict[str, str | None] = {}
    for path in tree.rglob("*"):
        name = str(path.relative_to(tree))
        if path.is_symlink():
            found[name] = "-> " + os.readlink(path)
        else:
            found[name] = None if path.is_dir() else path.read_text()
    return found


def refused(where: str | Path, root: Path, match: str) -> TaskError:
    """What is said of an image that is no good; nothing of it may be left."""
    with pytest.raises(TaskError, match=match) as caught:
        unpacked(where, root)
    assert caught.value.code == "bad_image"
    assert caught.value.fix
    assert list(root.glob("*")) == list(root.glob(".*")) == []
    return caught.value


# ---------------------------------------------------------------------------------------------- what it says


SPELLINGS: dict[str, Callable[[Path], str]] = {
    "a layout": lambda at: f"oci:{layout(at / 'l', SMALL)}",
    "a layout, gzip": lambda at: f"oci:{layout(at / 'l', SMALL, pack=gzipped)}",
    "a layout, zstd": lambda at: f"oci:{layout(at / 'l', SMALL, pack=zstandard.ZstdCompressor().compress)}",
    "its archive": lambda at: f"oci-archive:{archived(layout(at / 'l', SMALL), at / 'x.tar')}",
    "docker save": lambda at: f"docker-archive:{docker_saved(at / 'x.tar', SMALL)}",
    "docker save, by name": lambda at: f"docker-archive:{docker_saved(at / 'x.tar', SMALL)}:app:1",
    "docker save, gzip": lambda at: f"docker-archive:{packed(docker_saved(at / 'x.tar', SMALL))}",
    "an environment that is a layout": lambda at: str(layout(at / "environment", SMALL)),
    "an environment with an archive": lambda at: str(
        archived(layout(at / "l", SMALL), at / "image.tar").parent
    ),
    "an environment with docker save": lambda at: str(docker_saved(at / "image.tar", SMALL).parent),
}


def packed(file: Path) -> Path:
    file.write_bytes(gzipped(file.read_bytes()))
    return file


@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_every_spelling_is_the_same_tree_under_the_same_name(
    tmp_path: Path, spell: Callable[[Path], str]
) -> None:
    tree = unpacked(spell(tmp_path), tmp_path / "state")
    assert content(tree) == {
        "app": None,
        "app/a": "one",
        "app/c": "three",
        "bin": None,
        "bin/bash": BASH["bin/bash"],
    }
    assert tree.parent.name == f"oci-{sha(config(SMALL))}"
    assert [path.name for path in (tmp_path / "state").iterdir()] == [tree.parent.name]


def test_layers_that_docker_save_linked_are_read_once_each(tmp_path: Path) -> None:
    twice = [layer(BASH), layer({"a": "1"}), layer({".wh.a": ""}), layer({"a": "1"})]
    tree = unpacked(f"docker-archive:{docker_saved(tmp_path / 'x.tar', twice)}", tmp_path / "state")
    assert (tree / "a").read_text() == "1"


def test_a_relative_path_is_the_task_packages(tmp_path: Path) -> None:
    folder = a_task(tmp_path / "task", "oci:images/../image")
    layout(folder / "image", SMALL)
    task = package.load_task(folder)
    assert oci.located(task.sandbox.image, Path(task.path)) == f"oci:{folder / 'image'}"
    for other in ("debian:12", "dir:abc", "ghcr.io/oci:1"):
        assert oci.located(other, tmp_path) == other

    async def run() -> str:
        backend = LocalBackend(tmp_path / "state")
        digest = await prepare(task, backend)
        await backend.close()
        return digest

    assert asyncio.run(run()) == f"oci:{sha(config(SMALL))}"


def a_task(folder: Path, image: str) -> Path:
    return package.write_task(
        folder,
        config={
            "task": {"name": "t/t"},
            "environment": {"docker_image": image, "network_mode": "no-network"},
            "metadata": {"agentrl": {"grader": "script"}},
        },
        instruction="Do it.",
        environment={},
        tests={"test.sh": "#!/bin/bash\n"},
        solution="#!/bin/bash\n",
    )


@pytest.mark.parametrize(
    "image",
    [
        "oci:../image",
        "oci:{secret}",
        "docker-archive:{secret}/image.tar",
        "oci-archive:link/image.tar",
        "{secret}",
        "secret",
        "./secret",
        "../secret",
        "dir:",
    ],
)
def test_a_package_names_no_files_outside_of_itself_whoever_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str
) -> None:
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "secret"
    secret.mkdir()
    docker_saved(secret / "image.tar", SMALL)
    layout(tmp_path / "image", SMALL)
    folder = a_task(tmp_path / "task", image.format(secret=secret) if image != "dir:" else "debian:12")
    (folder / "link").symlink_to(secret)
    task = package.load_task(folder)
    if image == "dir:":  # what it brings leads out
        (folder / "environment").mkdir()
        (folder / "environment" / "image.tar").symlink_to(secret / "image.tar")
        task = replace(task, sandbox=replace(task.sandbox, image="dir:abc"))
    backend = LocalBackend(tmp_path / "state")
    with pytest.raises(TaskError) as caught:
        asyncio.run(prepare(task, backend))
    assert caught.value.code == "bad_image"
    assert not (tmp_path / "state").exists() or not list((tmp_path / "state").rglob("oci-*"))


def test_a_package_brings_its_image_under_any_path_of_its_own(tmp_path: Path) -> None:
    folder = a_task(tmp_path / "task", "docker-archive:here/../image.tar")
    docker_saved(folder / "image.tar", SMALL)
    (tmp_path / "other").symlink_to(folder)
    for place in (folder, tmp_path / "other"):
        task = package.load_task(place)
        named = replace(
            task, sandbox=replace(task.sandbox, image=f"docker-archive:{folder}/image.tar"), path=str(place)
        )
        for each in (task, named):
            assert image_of(each).endswith("/task/image.tar")


@pytest.mark.parametrize("image", ["oci:../../elsewhere", "docker-archive:/etc/image.tar", "oci:a/../../b"])
def test_an_uploaded_task_brings_its_image_or_names_one_of_a_registry(tmp_path: Path, image: str) -> None:
    folder = a_task(tmp_path / "task", image)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        tar.add(folder, arcname=".")
    with pytest.raises(TaskError, match="outside of it") as caught:
        archive.unpack(raw.getvalue(), tmp_path / "uploads")
    assert caught.value.code == "archive_path"
    assert list((tmp_path / "uploads").iterdir()) == []


# ----------------------------------------------------------------------------------------- which image it is


def test_of_an_index_this_machines_image_is_taken(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "l")
    rows = []
    for architecture in ("s390x", HERE):
        raw = [layer({**BASH, "for": architecture})]
        row = blobs.image(raw, settings=config(raw, architecture=architecture))
        rows.append({**row, "platform": {"os": "linux", "architecture": architecture}})
    notes = {**blobs.put(b"{}"), "platform": {"os": "unknown", "architecture": "unknown"}}
    blobs.index(blobs.put(json.dumps({"manifests": [*rows, notes]}).encode()))
    assert (unpacked(f"oci:{tmp_path / 'l'}", tmp_path / "state") / "for").read_text() == HERE
    blobs.index(rows[0])
    said = refused(f"oci:{tmp_path / 'l'}", tmp_path / "other", "linux/s390x, and this machine is linux")
    assert f"--platform linux/{HERE}" in str(said.fix)
    blobs.index({key: value for key, value in rows[0].items() if key != "platform"})
    refused(f"oci:{tmp_path / 'l'}", tmp_path / "other", "linux/s390x, and this machine is linux")


def test_of_several_images_one_is_named_or_all_are_listed(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "l")
    rows = [{**blobs.image([layer({**BASH, "is": tag})]), "annotations": {oci._TAGS[0]: tag}} for tag in "xy"]
    blobs.index(*rows)
    assert (unpacked(f"oci:{tmp_path / 'l'}:y", tmp_path / "state") / "is").read_text() == "y"
    refused(f"oci:{tmp_path / 'l'}", tmp_path / "other", "holds x, y")
    refused(f"oci:{tmp_path / 'l'}:z", tmp_path / "other", "holds x, y")
    saved = docker_saved(tmp_path / "x.tar", SMALL, ("app:1", "app:latest"))
    unpacked(f"docker-archive:{saved}:app", tmp_path / "more")
    refused(f"docker-archive:{saved}:other", tmp_path / "other", "holds app:1, app:latest")


# --------------------------------------------------------------------------------------------- what it holds


def in_order(*made: dict[str, Any] | list[tuple[str, Any]]) -> list[bytes]:
    return [layer(BASH), *(layer(files) for files in made)]


def test_whiteouts_hide_what_was_before_and_not_what_comes_with_them(tmp_path: Path) -> None:
    tree = unpacked(
        "oci:"
        + str(
            layout(
                tmp_path / "l",
                in_order(
                    {"a/old": "1", "a/deep/old": "1", "b/old": "1", "c": "1", "d/old": "1", "gone/x": "1"},
                    [
                        ("a/new", "2"),
                        ("a/.wh..wh..opq", ""),
                        ("b/.wh..wh..opq", ""),
                        ("b/new", "2"),
                        ("c", "2"),
                        (".wh.c", ""),
                        ("d/new", "2"),
                        (".wh.d", ""),
                        (".wh.gone", ""),
                        (".wh..wh.plnk", ""),
                        (".wh.never", ""),
                    ],
                ),
            )
        ),
        tmp_path / "state",
    )
    found = {k: v for k, v in content(tree).items() if v is not None and not k.startswith("bin")}
    assert found == {"a/new": "2", "b/new": "2", "c": "2", "d/new": "2"}


NAMES = ["a", "b", "a/c", "a/d", "b/c", "a/c/e"]
OPS = st.lists(
    st.tuples(st.sampled_from(["file", "folder", "hide", "opaque"]), st.sampled_from(NAMES)), max_size=5
)


def by_the_book(stack: list[list[tuple[str, str]]]) -> dict[str, str | None]:
    """The specification as a slow dictionary: a layer's whiteouts first, against what is below, then its
    files."""
    tree: dict[str, str | None] = {}

    def drop(name: str) -> None:
        for path in [p for p in tree if p == name or p.startswith(name + "/")]:
            del tree[path]

    for number, ops in enumerate(stack):
        for op, name in ops:
            if op == "hide":
                drop(name)
            elif op == "opaque":
                for path in [p for p in tree if p.startswith(name + "/")]:
                    del tree[path]
        for op, name in ops:
            parents = [name.rsplit("/", n)[0] for n in range(name.count("/"), 0, -1)]
            for parent in [
                *(parents if op in ("file", "folder") else []),
                *([name] if op == "folder" else []),
            ]:
                if tree.get(parent, "") is not None:
                    drop(parent)
                    tree[parent] = None
            if op == "file":
                drop(name)
                tree[name] = str(number)
    return tree


@settings(max_examples=60, deadline=None)
@given(stack=st.lists(OPS, min_size=1, max_size=4))
def test_layers_come_out_as_the_specification_says(
    stack: list[list[tuple[str, str]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("layers")
    tree = layers.Tree(folder, name="x", first_id=None)
    for number, ops in enumerate(stack):
        files: list[tuple[str, Any]] = []
        for op, name in ops:
            above, _, last = name.rpartition("/")
            hidden = f"{above}/.wh.{last}".lstrip("/")
            kinds = {
                "file": (name, str(number)),
                "folder": (name, None),
                "hide": (hidden, ""),
                "opaque": (f"{name}/.wh..wh..opq", ""),
            }
            files.append(kinds[op])
        files.sort(key=lambda file: ".wh." not in file[0])  # As every tool writes them: whiteouts first.
        tree.apply(io.BytesIO(layer(files)))
    tree.finish()
    expected = by_the_book(stack)
    assert content(folder) == expected


def test_a_name_that_comes_again_replaces_and_is_never_written_through(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    made = in_order(
        {"first": "1", "second": entry("second", tarfile.LNKTYPE, linkname="first")},
        [("l", link("l", str(outside))), ("l", "through"), ("first", "other"), ("first", "last")],
    )
    tree = unpacked(f"oci:{layout(tmp_path / 'l', made)}", tmp_path / "state")
    assert outside.read_text() == "mine"
    assert {name: (tree / name).read_text() for name in ("l", "first", "second")} == {
        "l": "through",
        "first": "last",
        "second": "1",
    }
    assert not (tree / "l").is_symlink()


def test_a_link_of_the_image_leads_inside_of_it_whatever_it_says(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o711)
    made = in_order(
        [
            ("usr/lib", None),
            ("lib", link("lib", "usr/lib")),
            ("up", link("up", "../../../../../../" + str(outside))),
            ("out", link("out", str(outside))),
        ],
        {
            "lib/x": "merged",
            "up/x": "1",
            "out/y": "2",
            "out/z": entry("out/z", tarfile.LNKTYPE, linkname="out/y"),
        },
        [("m", None), ("m/" + outside.name, None), ("m", link("m", str(tmp_path)))],
    )
    tree = unpacked(f"oci:{layout(tmp_path / 'l', made)}", tmp_path / "state")
    assert list(outside.iterdir()) == []
    assert stat.S_IMODE(outside.stat().st_mode) == 0o711, "the mode of a folder that became a link"
    assert (tree / "usr/lib/x").read_text() == "merged"
    below = tree / str(outside).lstrip("/")
    assert {path.name: path.read_text() for path in below.iterdir()} == {"x": "1", "y": "2", "z": "2"}


def test_what_no_sandbox_needs_is_left_out(tmp_path: Path) -> None:
    made = in_order(
        [
            ("dev/sda", entry("dev/sda", tarfile.BLKTYPE, devmajor=8, devminor=0)),
            ("hole", entry("hole", tarfile.CHRTYPE, devmajor=0, devminor=0)),
            ("pipe", entry("pipe", tarfile.FIFOTYPE)),
            ("su", entry("su", mode=0o6755, pax_headers={"SCHILY.xattr.user.overlay.opaque": "y"})),
            ("shared", entry("shared", tarfile.DIRTYPE, mode=0o3777, mtime=-5)),
        ]
    )
    tree = unpacked(f"oci:{layout(tmp_path / 'l', made)}", tmp_path / "state")
    assert sorted(path.name for path in tree.iterdir()) == ["bin", "dev", "shared", "su"]
    assert list((tree / "dev").iterdir()) == []
    assert stat.S_IMODE((tree / "su").stat().st_mode) == 0o755
    assert stat.S_IMODE((tree / "shared").stat().st_mode) == 0o1777
    assert os.listxattr(tree / "su") == []


# ----------------------------------------------------------------------------------------------- what is bad


HOSTILE: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "a name that leads out": ("leads out of it", [("../x", "1")]),
    "a folder that leads out": ("leads out of it", [("a/../../x", None)]),
    "a hard link out": ("outside of it", [("x", entry("x", tarfile.LNKTYPE, linkname="../../etc/passwd"))]),
    "a hard link to the machine's": (
        "which it does not hold",
        [("x", entry("x", tarfile.LNKTYPE, linkname="/etc/hostname"))],
    ),
    "a hard link through a link": (
        "which it does not hold",
        [("e", link("e", "/etc")), ("x", entry("x", tarfile.LNKTYPE, linkname="e/hostname"))],
    ),
    "a hard link to a folder": ("to a folder", [("x", entry("x", tarfile.LNKTYPE, linkname="bin"))]),
    "a whiteout of the folder above": ("no name", [("a/.wh...", "")]),
    "a whiteout of nothing": ("no name", [("a/.wh.", "")]),
    "links in a circle": (
        "can not be unpacked",
        [("a", link("a", "b")), ("b", link("b", "a")), ("a/x", "1")],
    ),
    "a name that is too long": ("can not be unpacked", [("n" * 300, "1")]),
    "too deep": ("nests folders", [("d/" * 300 + "x", "1")]),
    "a link to nowhere": ("can not be unpacked", [("x", link("x", ""))]),
    "a file where a folder must be": ("/tmp should be a folder", [("tmp", "1")]),
    "a circle where a folder must be": ("/etc should be a folder", [("etc", link("etc", "etc"))]),
    "a kind that nobody knows": ("of an unknown kind", [("x", entry("x", b"V"))]),
    "a file with holes": ("with holes", [("x", entry("x", pax_headers={"GNU.sparse.map": "0,0"}))]),
}


@pytest.mark.parametrize("case", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_layer_is_refused_and_leaves_nothing(
    tmp_path: Path, case: tuple[str, list[tuple[str, Any]]]
) -> None:
    match, files = case
    before = sorted(tmp_path.iterdir())
    where = layout(tmp_path / "l", in_order(files))
    refused(f"oci:{where}", tmp_path / "state", match)
    assert sorted(set(tmp_path.iterdir()) - {where, tmp_path / "state"}) == before


def damaged(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


def blob(where: Path, number: int) -> Path:
    """Of the layers of the small image, the configuration (-1)."""
    return where / "blobs" / "sha256" / sha(SMALL[number] if number >= 0 else config(SMALL))


def flipped(data: bytes) -> bytes:
    return data[:700] + bytes([data[700] ^ 1]) + data[701:]


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a flipped bit of a layer": ("layer 1 of 2 is not sha256", lambda at: damaged(blob(at, 0), flipped)),
    "a layer cut short": ("layer 2 of 2 is not sha256", lambda at: damaged(blob(at, 1), lambda d: d[:-5])),
    "a layer that is not there": ("lacks blobs/sha256", lambda at: blob(at, 1).unlink()),
    "another configuration": ("is damaged", lambda at: damaged(blob(at, -1), lambda d: d + b" ")),
    "no configuration": ("lacks blobs/sha256", lambda at: blob(at, -1).unlink()),
    "no index": ("lacks index.json", lambda at: (at / "index.json").unlink()),
    "an index that is no JSON": (
        "can not be read: index.json",
        lambda at: damaged(at / "index.json", lambda d: d[:-1]),
    ),
    "an index of nothing": (
        "for no machine",
        lambda at: damaged(at / "index.json", lambda _: b'{"manifests": []}'),
    ),
    "an index that is a list": ("is no table", lambda at: damaged(at / "index.json", lambda _: b"[]")),
    "an index nested for ever": (
        "can not be read: index.json",
        lambda at: damaged(at / "index.json", lambda _: b"[" * 100_000),
    ),
    "an index of lists": (
        "lists none",
        lambda at: damaged(at / "index.json", lambda _: b'{"manifests": [[1]]}'),
    ),
    "a digest that is a path": (
        "no sha256",
        lambda at: damaged(at / "index.json", lambda _: b'{"manifests": [{"digest": "sha256:../../etc"}]}'),
    ),
    "a document without end": (
        "more than 4 MiB",
        lambda at: damaged(at / "index.json", lambda _: b" " * (5 << 20)),
    ),
    "a layout of the future": (
        "layout that is not known",
        lambda at: damaged(at / "oci-layout", lambda _: b'{"imageLayoutVersion": "9"}'),
    ),
}


@pytest.mark.parametrize("case", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_layout_is_refused_with_what_is_wrong(
    tmp_path: Path, case: tuple[str, Callable[[Path], None]]
) -> None:
    match, damage = case
    where = layout(tmp_path / "l", SMALL)
    damage(where)
    refused(f"oci:{where}", tmp_path / "state", match)


def test_what_a_layer_holds_is_compared_with_the_configuration(tmp_path: Path) -> None:
    other = [SMALL[0], layer({"planted": "1"})]
    where = layout(tmp_path / "l", other, pack=gzipped, settings=config(SMALL))
    refused(f"oci:{where}", tmp_path / "state", "layer 2 of 2 does not hold")
    saved = docker_saved(tmp_path / "x.tar", SMALL)
    with tarfile.open(saved) as tar:
        files = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    saved.write_bytes(layer({**files, "1/layer.tar": other[1]}))
    refused(f"docker-archive:{saved}", tmp_path / "state", "layer 2 of 2 does not hold")
    fewer = layout(tmp_path / "m", SMALL, settings=config(SMALL[:1]))
    refused(f"oci:{fewer}", tmp_path / "state", "has 2 layers, and its configuration 1")


def bad_layer(raw: bytes) -> Callable[[Path], str]:
    return lambda at: f"oci:{layout(at / 'l', [layer(BASH), raw])}"


def written(file: Path, data: bytes) -> Path:
    file.write_bytes(data)
    return file


def without_digests(said: Any) -> bytes:
    facts = json.loads(config(SMALL))
    return json.dumps({**facts, "rootfs": {"diff_ids": [said, said]}}).encode()


def encrypted(where: Path) -> Path:
    blobs = Blobs(where)
    rows = [{**blobs.put(raw), "mediaType": "application/x.tar+encrypted"} for raw in SMALL]
    blobs.index(blobs.put(json.dumps({"config": blobs.put(config(SMALL)), "layers": rows}).encode()))
    return where


def nested(where: Path, times: int) -> Path:
    blobs = Blobs(where)
    row = blobs.image(SMALL)
    for _ in range(times):
        row = blobs.put(json.dumps({"manifests": [row]}).encode())
    blobs.index(row)
    return where


def beside_files(folder: Path) -> Path:
    layout(folder, SMALL)
    (folder / "files").mkdir()
    return folder


def with_volume(where: Path, volume: str) -> Path:
    return layout(where, SMALL, settings=config(SMALL, Volumes={volume: {}}))


UNREADABLE: dict[str, tuple[str, Callable[[Path], str]]] = {
    "no tar at all": ("can not be read: layer 2 of 2", bad_layer(b"no tar" * 1000)),
    "a tar cut short": ("layer 2 of 2: it ends too early", bad_layer(layer({"x": "1" * 5000})[:2000])),
    "a gzip cut short": ("can not be read", bad_layer(gzipped(layer({"x": os.urandom(9000)}))[:4000])),
    "a zstd cut short": (
        "can not be read|is damaged",
        bad_layer(zstandard.ZstdCompressor().compress(layer({"x": os.urandom(9000)}))[:4000]),
    ),
    "a zstd that is none": (
        "can not be read: layer 1 of 2",
        lambda at: f"oci:{layout(at / 'l', SMALL, pack=lambda raw: bytes.fromhex('28b52ffd') + raw)}",
    ),
    "an archive whose links go round": (
        "lacks manifest.json",
        lambda at: (
            "docker-archive:"
            + str(
                written(
                    at / "x",
                    layer([("manifest.json", link("manifest.json", "a")), ("a", link("a", "manifest.json"))]),
                )
            )
        ),
    ),
    "a manifest that names no layers": (
        "names no layers",
        lambda at: (
            "docker-archive:"
            + str(written(at / "x", layer({"manifest.json": '[{"Config": 1, "Layers": ["a"]}]'})))
        ),
    ),
    "an image that does not say what it holds": (
        "does not say what its layers hold",
        lambda at: f"oci:{layout(at / 'l', SMALL, settings=without_digests('sha256:short'))}",
    ),
    "an image that holds numbers": (
        "does not say what its layers hold",
        lambda at: f"oci:{layout(at / 'l', SMALL, settings=without_digests(1))}",
    ),
    "an encrypted layer": ("is encrypted", lambda at: f"oci:{encrypted(at / 'l')}"),
    "indexes of indexes": ("nests its indexes too deeply", lambda at: f"oci:{nested(at / 'l', 5)}"),
    "files beside a layout": ("lies beside files/", lambda at: str(beside_files(at / "environment"))),
    "a relative volume": ("declares the volume 'data'", lambda at: f"oci:{with_volume(at / 'l', 'data')}"),
    "a volume outside": ("declares the volume", lambda at: f"oci:{with_volume(at / 'l', '/a/../../b')}"),
    "a volume over the kernel's": (
        "declares the volume",
        lambda at: f"oci:{with_volume(at / 'l', '/proc/x')}",
    ),
    "a header that claims a gigabyte": (
        "headers are longer",
        bad_layer(entry("x", tarfile.XHDTYPE, size=1 << 30).tobuf(tarfile.GNU_FORMAT) + bytes(5000)),
    ),
    "headers of headers of headers": (
        "can not be read",
        bad_layer((entry("x", tarfile.GNUTYPE_LONGNAME, size=1).tobuf() + bytes(512)) * 3000),
    ),
    "a pax record that lies": (
        "can not be read",
        bad_layer(entry("x", tarfile.XHDTYPE, size=20).tobuf() + b"99999 path=abcdefg\n\0".ljust(512, b"\0")),
    ),
    "an archive that is none": (
        "can not be read",
        lambda at: f"docker-archive:{written(at / 'x', b'x' * 4000)}",
    ),
    "an archive cut short": (
        "can not be read|lacks|is damaged",
        lambda at: f"docker-archive:{written(at / 'x', docker_saved(at / 'y', SMALL).read_bytes()[:9000])}",
    ),
    "an archive with a name twice": (
        "twice",
        lambda at: f"oci-archive:{written(at / 'x', layer([('index.json', '{}'), ('./index.json', '{}')]))}",
    ),
    "an archive that is a folder": ("no such file", lambda at: f"docker-archive:{at}"),
    "a layout that is not there": ("no such folder", lambda at: f"oci:{at / 'never'}"),
    "a path of nobody": ("relative path", lambda at: "oci:somewhere"),
}


@pytest.mark.parametrize("case", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_is_no_image_is_refused_and_leaves_nothing(
    tmp_path: Path, case: tuple[str, Callable[[Path], str]]
) -> None:
    match, make = case
    refused(make(tmp_path), tmp_path / "state", match)


def test_a_small_file_that_unpacks_to_a_large_one_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "MAX_BYTES", 8 << 20)
    monkeypatch.setattr(oci, "MAX_BYTES", 8 << 20)
    zeros = layer({"zeros": bytes(9 << 20)})
    where = layout(tmp_path / "l", [layer(BASH), zeros], pack=gzipped)
    assert blob_size(where, gzipped(zeros)) < 100_000
    refused(f"oci:{where}", tmp_path / "state", "unpacks to more than")
    after = layer({"x": "1"}) + bytes(9 << 20)  # Behind the end of the tar.
    refused(f"oci:{layout(tmp_path / 'm', [layer(BASH), after])}", tmp_path / "state", "unpacks to more")
    packed_whole = written(tmp_path / "x.tar.gz", gzip.compress(bytes(9 << 20)))
    refused(f"docker-archive:{packed_whole}", tmp_path / "state", "unpacks to more than")


def blob_size(where: Path, data: bytes) -> int:
    return (where / "blobs" / "sha256" / sha(data)).stat().st_size


def test_many_small_headers_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "HEADER_BYTES", 1 << 20)
    raw = [
        (f"f{n}", entry(f"f{n}", pax_headers={"comment": "x" * 40_000, "mtime": "1.5"})) for n in range(60)
    ]
    where = layout(tmp_path / "l", in_order(raw))
    refused(f"oci:{where}", tmp_path / "state", "headers are longer")
    monkeypatch.setattr(layers, "MAX_ENTRIES", 5)
    many = layout(tmp_path / "m", in_order({f"f{n}": "" for n in range(6)}))
    refused(f"oci:{many}", tmp_path / "state", "more than 5 files")


def test_headers_count_too_and_what_follows_the_last_file_is_read_however_long_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    padded = layer({"x": "1"}) + bytes(HEADER_BYTES + (1 << 20))
    assert (unpacked(f"oci:{layout(tmp_path / 'm', [layer(BASH), padded])}", tmp_path / "s") / "x").is_file()
    monkeypatch.setattr(layers, "MAX_BYTES", 3 << 20)
    many = layout(tmp_path / "l", in_order({f"f{n}": "" for n in range(6200)}))
    refused(f"oci:{many}", tmp_path / "state", "unpacks to more than")


def test_while_a_layer_is_unpacked_the_room_is_looked_at_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise SandboxError("It is full by now.", code="disk_pressure", phase="prepare")

    monkeypatch.setattr(layers, "_LOOK_BYTES", 1 << 20)
    monkeypatch.setattr(layers, "require_room", full)
    small, large = layout(tmp_path / "s", SMALL), layout(tmp_path / "l", in_order({"x": bytes(3 << 20)}))
    unpacked(f"oci:{small}", tmp_path / "small")
    with pytest.raises(SandboxError, match="full by now"):
        unpacked(f"oci:{large}", tmp_path / "state")
    assert list((tmp_path / "state").iterdir()) == []


def test_unzipping_an_archive_needs_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = oci.reference(f"docker-archive:{docker_saved(tmp_path / 'x.tar', SMALL)}")
    zipped = oci.reference(f"docker-archive:{packed(docker_saved(tmp_path / 'y.tar', SMALL))}")
    assert plain is not None
    assert zipped is not None
    assert oci.identity(zipped, tmp_path) == oci.identity(plain, tmp_path)
    monkeypatch.setattr(images, "LOW_BYTES", 1 << 60)
    oci.identity(plain, tmp_path)
    with pytest.raises(SandboxError, match="MiB left"):
        oci.identity(zipped, tmp_path)


def test_a_reader_that_goes_forwards_does_not_go_back() -> None:
    reader = Forwards(io.BytesIO(bytes(100)), allowed=100, refuse=ValueError)
    reader.seek(10)
    reader.seek(10)
    with pytest.raises(tarfile.ReadError, match="back into itself"):
        reader.seek(5)


@pytest.mark.parametrize("wanted", ["oci:", "oci::tag", "docker-archive:a\0b"])
def test_a_name_without_a_file_is_the_tasks_mistake(wanted: str) -> None:
    with pytest.raises(TaskError, match="names no file") as caught:
        oci.reference(wanted)
    assert caught.value.code == "bad_image"


@pytest.mark.parametrize("digest", ["oci:" + "0" * 64, "oci:../../etc", "dir:x", ""])
def test_an_image_that_was_never_unpacked_is_unknown(tmp_path: Path, digest: str) -> None:
    with pytest.raises(SandboxError, match="no prepared image") as caught:
        OciImages(tmp_path, None, None).require(digest)
    assert (caught.value.code, caught.value.retryable) == ("image_unknown", False)


def test_a_state_folder_that_can_not_be_written_is_the_machines(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SandboxError, match="could not be unpacked") as caught:
        unpacked(f"oci:{layout(tmp_path / 'l', SMALL)}", tmp_path / "file" / "state")
    assert (caught.value.code, caught.value.owner) == ("image_copy", "environment")


def test_a_workdir_behind_links_in_a_circle_is_refused(tmp_path: Path) -> None:
    where = oci.reference(
        f"oci:{layout(tmp_path / 'l', in_order({'a': link('a', 'b'), 'b': link('b', 'a')}))}"
    )
    assert where is not None
    store = OciImages(tmp_path / "state", None, None)
    digest = asyncio.run(store.prepare(where))
    with pytest.raises(TaskError, match="has no folder /a/x") as caught:
        asyncio.run(store.workdir(digest, "/a/x"))
    assert caught.value.code == "bad_image"


def test_what_is_damaged_is_not_saved_for_an_engine_either(tmp_path: Path) -> None:
    where = layout(tmp_path / "l", SMALL)
    wanted = oci.reference(f"oci:{where}")
    assert wanted is not None
    oci.save(wanted, tmp_path, "a:1", io.BytesIO())
    damaged(blob(where, 0), flipped)
    out = io.BytesIO()
    with pytest.raises(TaskError, match="layer 1 of 2 is not sha256"):
        oci.save(wanted, tmp_path, "a:1", out)
    assert out.getvalue() == b"", "it is looked at before anything is written"


def test_a_full_disk_is_the_machines_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = layout(tmp_path / "l", SMALL)
    monkeypatch.setattr(images, "LOW_BYTES", 1 << 60)
    with pytest.raises(SandboxError) as caught:
        unpacked(f"oci:{where}", tmp_path / "state")
    assert (caught.value.code, caught.value.owner) == ("disk_pressure", "environment")
    assert list((tmp_path / "state").iterdir()) == []


def test_an_image_without_bash_is_refused_like_everywhere(tmp_path: Path) -> None:
    for number, files in enumerate(
        (
            {"bin/sh": "x"},
            {"bin/bash": None},
            {"bin/bash": link("bin/bash", "/usr/bin/bash")},
            {"bin/bash": entry("bin/bash", mode=0o644)},
        )
    ):
        where = layout(tmp_path / f"l{number}", [layer(files)])
        with pytest.raises(SandboxError, match="has no bash") as caught:
            unpacked(f"oci:{where}", tmp_path / "state")
        assert (caught.value.code, caught.value.owner, caught.value.retryable) == ("no_bash", "task", False)
        assert list((tmp_path / "state").iterdir()) == []


def test_backends_that_can_not_run_it_say_what_to_do(tmp_path: Path) -> None:
    where = f"oci:{layout(tmp_path / 'l', SMALL)}"

    async def no() -> bool:
        return False

    async def run() -> None:
        cluster = KubernetesImages(tmp_path / "k", base_image=None, shares_engine=no)
        plain = PlainBackend(tmp_path / "plain")
        for prepare_, match in ((cluster.prepare, "registry"), (plain.prepare, "local or the docker")):
            for wanted in (where, str(tmp_path / "l")):
                with pytest.raises(TaskError, match=match) as caught:
                    await prepare_(wanted)
                assert caught.value.code == "image_unsupported"
        await plain.close()

    asyncio.run(run())


# ------------------------------------------------------------------------------------ at once, and half-done


def test_however_many_ask_at_once_it_is_one_tree(tmp_path: Path) -> None:
    where = oci.reference(f"oci:{layout(tmp_path / 'l', SMALL)}")
    assert where is not None
    stores = [OciImages(tmp_path / "state", None, None) for _ in range(2)]

    async def run() -> set[str]:
        return set(await asyncio.gather(*(store.prepare(where) for store in stores for _ in range(4))))

    assert asyncio.run(run()) == {f"oci:{sha(config(SMALL))}"}
    assert len(list((tmp_path / "state").iterdir())) == 1


def test_what_a_killed_process_left_half_done_is_swept_and_what_lives_is_not(tmp_path: Path) -> None:
    root = tmp_path / "state"
    for name in (".oci-dead", ".oci-live", ".oci-new"):
        (root / name / "tree").mkdir(parents=True)
    old = time.time() - 2 * oci.FRESH_S
    for name in (".oci-dead", ".oci-live"):
        os.utime(root / name, (old, old))
    held = os.open(root / ".oci-live", os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        unpacked(f"oci:{layout(tmp_path / 'l', SMALL)}", root)
    finally:
        os.close(held)
    assert sorted(path.name for path in root.glob(".oci-*")) == [".oci-live", ".oci-new"]


# ---------------------------------------------------------------------------------------------- in a sandbox


@contextlib.asynccontextmanager
async def inside(
    backend: LocalBackend, where: Path, *, workdir: str = "/app", env: dict[str, str] | None = None
) -> AsyncIterator[Sandbox]:
    digest = await backend.prepare(f"oci:{where}")
    spec = SandboxSpec(
        image=digest, pids=64, memory_mib=256, disk_mib=64, workdir=workdir, env={} if env is None else env
    )
    box = await backend.create(spec, image=digest, session="s")
    try:
        yield box
    finally:
        await box.close()


async def sh(box: Sandbox, command: str) -> str:
    result = await box.exec(ExecRequest(exec_id=os.urandom(8).hex(), command=command))
    return result.stdout.text() + result.stderr.text()


def test_a_sandbox_is_the_image_and_its_work_is_the_diff(backend: LocalBackend, tmp_path: Path) -> None:
    raw = [base(), layer({"app/seen.txt": "from the image", "app/gone.txt": "x", "marker": "1"})]
    about = config(
        raw,
        Env=["PATH=/usr/local/bin:/usr/bin:/bin", "COLOUR=blue", "SIZE=1", "HOME=/x"],
        Volumes={"/data": {}},
    )
    where = layout(tmp_path / "l", raw, settings=about)

    async def run() -> None:
        async with inside(backend, where, env={"SIZE": "2"}) as box:
            assert await sh(box, "cat seen.txt; pwd") == "from the image/app\n"
            assert await sh(box, "echo $COLOUR $SIZE $HOME $PATH") == (
                "blue 2 /home/policy /usr/local/bin:/usr/bin:/bin\n"
            )
            assert (
                await sh(box, "python3 -c 'print(6 * 7)'; ls -d /marker /srv 2>/dev/null") == "42\n/marker\n"
            )
            assert "Read-only" in await sh(box, "touch /usr/bin/x")
            root = await box.exec(ExecRequest(exec_id="root", command="touch /etc/x /marker", user="root"))
            assert b"Read-only" in root.stderr.head
            assert await sh(box, "touch /data/x /tmp/x ~/x && cat /etc/hostname") == "sandbox\n"
            await sh(box, "rm gone.txt; echo new > made.txt; echo more >> seen.txt")
            changes = {change.path: (change.kind, change.content) for change in await box.diff()}
            assert changes == {
                "gone.txt": ("deleted", None),
                "made.txt": ("file", b"new\n"),
                "seen.txt": ("file", b"from the imagemore\n"),
            }
        async with inside(backend, where) as again:
            assert await sh(again, "cat seen.txt gone.txt; ls /data") == "from the imagex"
        await backend.close()

    asyncio.run(run())
    assert {path.name[:4] for path in (tmp_path / "state" / "images").iterdir()} == {"oci-"}


LED_AWAY = ("etc", "run", "home", "var", "root", "logs", "app")
"""Folders in which, or at which, a sandbox mounts something of its own."""


def test_links_of_the_image_where_a_sandbox_mounts_things_lead_nowhere_on_this_machine(
    backend: LocalBackend, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    for name in LED_AWAY:
        (outside / name).mkdir(parents=True)
    (outside / "etc" / "hosts").write_text("mine")
    (outside / "app" / "y").write_text("mine")
    before = content(outside)
    hooks: list[tuple[str, Any]] = [(f".wh.{name}", "") for name in LED_AWAY]
    hooks += [(name, link(name, f"{outside}/{name}")) for name in LED_AWAY]
    where = layout(tmp_path / "l", [base(), layer(hooks)])

    async def run() -> None:
        async with inside(backend, where) as box:
            assert await sh(box, "ls -A; echo x > y; cat /app/y") == "x\n"
            assert [change.path for change in await box.diff()] == ["y"]
        await backend.close()

    asyncio.run(run())
    assert content(outside) == before


@pytest.mark.parametrize("name", ["dev", "proc"])
def test_an_image_that_leads_away_what_programs_open_by_name_is_refused(tmp_path: Path, name: str) -> None:
    where = layout(tmp_path / "l", in_order({name: link(name, f"{tmp_path}/{name}")}))
    refused(f"oci:{where}", tmp_path / "state", f"/{name} should be a folder")


def test_a_link_for_a_workdir_does_not_copy_the_machines_files(backend: LocalBackend, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("mine")
    where = layout(tmp_path / "l", [base(), layer([(".wh.app", ""), ("app", link("app", str(secret)))])])

    async def run() -> None:
        async with inside(backend, where) as box:
            assert await sh(box, "ls -A /app") == ""
        await backend.close()

    asyncio.run(run())


class Imaged:
    """A backend whose environments are images: a system, and the folder's files at the workdir."""

    def __init__(self, inner: LocalBackend, folder: Path) -> None:
        self._inner = inner
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def prepare(self, environment_dir: str) -> str:
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w") as tar:
            tar.add(environment_dir, arcname="app", filter=lambda m: None if "Dockerfile" in m.name else m)
        image = [base(), raw.getvalue()]
        where = self._folder / sha(config(image))
        if not where.is_dir():
            layout(where, image)
        return await self._inner.prepare(f"oci:{where}")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Case, asyncio.Runner]]:
    folder = tmp_path_factory.mktemp("imaged")
    backend = LocalBackend(folder / "state")
    try:
        backend.check()
    except SandboxError as error:
        pytest.skip(str(error))

    def kill(box: Sandbox) -> None:
        os.kill(box.agent_pid, 9)  # type: ignore[attr-defined]

    with asyncio.Runner() as runner:
        yield Case(Imaged(backend, folder), folder, kill), runner
        runner.run(backend.close())


OF_TIME = frozenset(
    {
        "a_fork_bomb_hurts_only_its_own_sandbox",
        "a_timeout_ends_the_whole_tree_and_says_that_it_did",
        "a_background_child_with_the_pipes_does_not_hold_the_answer",
        "output_before_a_timeout_is_cut_like_any_other",
    }
)
"""They take seconds, and the system's files have no part in them: `test_conformance` has them."""


@pytest.mark.parametrize("kind", [k for k in KINDS if k.name not in OF_TIME], ids=lambda kind: kind.name)
def test_the_contract_holds_in_an_image(running: tuple[Case, asyncio.Runner], kind: Kind) -> None:
    case, runner = running
    if kind.memory and not case.backend.limits_memory:  # type: ignore[attr-defined]
        pytest.skip("no memory control group can be made here")
    runner.run(asyncio.wait_for(kind.run(case), 120))


# -------------------------------------------------------------------------------------------- with an engine


@pytest.mark.docker
def test_what_docker_saves_runs_here_and_is_loaded_there_alike(backend: LocalBackend, tmp_path: Path) -> None:
    engine_or_skip()
    files = [base(), layer({"app/seen.txt": "saved"})]
    (tmp_path / "import.tar").write_bytes(docker_saved(tmp_path / "x", files, (NAME,)).read_bytes())
    docker("load", "--input", str(tmp_path / "import.tar"))
    saved = tmp_path / "saved.tar"
    try:
        docker("save", "--output", str(saved), NAME)
    finally:
        docker("rmi", NAME)
    containers = DockerBackend(tmp_path / "docker")

    async def seen(where: Backend, digest: str) -> tuple[str, list[tuple[str, str]]]:
        spec = SandboxSpec(image=digest, pids=64, memory_mib=256, disk_mib=64)
        box = await where.create(spec, image=digest, session="s")
        try:
            said = await sh(
                box, "cat seen.txt; id -u; pwd; touch /usr/x; echo new > made.txt; ls -ld / /usr/bin"
            )
            return said, [(change.path, change.kind) for change in await box.diff()]
        finally:
            await box.close()

    async def run() -> None:
        wanted = f"docker-archive:{saved}:{NAME}"
        digests = [await where.prepare(wanted) for where in (backend, containers)]
        try:
            assert digests == [f"oci:{sha(config(files))}"] * 2
            said, changes = await seen(backend, digests[0])
            assert said.startswith("saved1000\n/app\n")
            assert changes == [("made.txt", "file")]
            there, changes_there = await seen(containers, digests[1])
            assert there.splitlines()[:2] == said.splitlines()[:2]
            assert ("Read-only" in there, "Read-only" in said) == (True, True)
            assert changes_there == changes
        finally:
            await containers.close()
            await backend.close()
            docker("rmi", SAVED + sha(config(files)))

    asyncio.run(run())
