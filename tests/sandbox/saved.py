"""Small images as layouts and archives, whole or broken on purpose."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from envs.sandbox import rootfs

HERE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
BASH = {"bin/bash": "a shell, as far as looking goes"}
Made = Mapping[str, Any]
"""Text or bytes: a file; None: a folder; a TarInfo: as it is; in order."""


def entry(name: str, kind: bytes = tarfile.REGTYPE, **values: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode = kind, 0o755
    for key, value in values.items():
        setattr(info, key, value)
    return info


def link(name: str, to: str) -> tarfile.TarInfo:
    return entry(name, tarfile.SYMTYPE, linkname=to)


def layer(files: Made | Iterable[tuple[str, Any]]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items() if isinstance(files, Mapping) else files:
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
            elif content is None:
                tar.addfile(entry(name, tarfile.DIRTYPE))
            else:
                data = content.encode() if isinstance(content, str) else content
                tar.addfile(entry(name, size=len(data), mode=0o755), io.BytesIO(data))
    return raw.getvalue()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def config(layers: list[bytes], *, architecture: str = HERE, **values: Any) -> bytes:
    roots = {"type": "layers", "diff_ids": [f"sha256:{sha(raw)}" for raw in layers]}
    facts = {"os": "linux", "architecture": architecture, "rootfs": roots, "config": values}
    return json.dumps(facts).encode()


class Blobs:
    """A layout folder that is being written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs" / "sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def put(self, data: bytes) -> dict[str, Any]:
        (self.folder / "blobs" / "sha256" / sha(data)).write_bytes(data)
        return {"digest": f"sha256:{sha(data)}", "size": len(data)}

    def image(
        self, layers: list[bytes], *, pack: Callable[[bytes], bytes] = bytes, settings: bytes | None = None
    ) -> dict[str, Any]:
        rows = [self.put(pack(raw)) for raw in layers]
        about = self.put(config(layers) if settings is None else settings)
        return self.put(json.dumps({"config": about, "layers": rows}).encode())

    def index(self, *manifests: dict[str, Any]) -> None:
        (self.folder / "index.json").write_text(json.dumps({"manifests": manifests}))


def layout(
    folder: Path,
    layers: list[bytes],
    *,
    pack: Callable[[bytes], bytes] = bytes,
    settings: bytes | None = None,
) -> Path:
    blobs = Blobs(folder)
    blobs.index(blobs.image(layers, pack=pack, settings=settings))
    return folder


def archived(folder: Path, file: Path) -> Path:
    """A layout folder as one tar."""
    with tarfile.open(file, "w") as tar:
        tar.add(folder, arcname=".")
    return file


def docker_saved(file: Path, layers: list[bytes], tags: tuple[str, ...] = ("app:1",)) -> Path:
    """As old engines write it: layers that are the same are links."""
    about = config(layers)
    first: dict[str, str] = {}
    files: list[tuple[str, Any]] = []
    names = []
    for number, raw in enumerate(layers):
        name = f"{number}/layer.tar"
        names.append(name)
        there = first.setdefault(sha(raw), name)
        files.append((name, raw if there == name else link(name, f"../{there}")))
    listing = [{"Config": f"{sha(about)}.json", "RepoTags": list(tags), "Layers": names}]
    files += [(f"{sha(about)}.json", about), ("manifest.json", json.dumps(listing))]
    file.write_bytes(layer(files))
    return file


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=1, mtime=0)


@functools.cache
def base() -> bytes:
    """A layer with this machine's own bash, git and Python."""
    raw = io.BytesIO()
    rootfs.write_rootfs(raw)
    return raw.getvalue()
