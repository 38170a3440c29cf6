"""Task packages that tenants bring themselves."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path

import pytest
from gateway_given import task_at, world

from agentrl.errors import ConfigError, SandboxError
from agentrl.store import Store
from agentrl.types import Task
from harness.gateway import client as calls
from harness.gateway import wire
from services.gateway.limits import MAX_FILE_BYTES


def packed(folder: str | Path) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as out:
        out.add(folder, arcname=".")
    return raw.getvalue()


def test_a_task_that_was_uploaded_is_there_for_everybody_also_after_a_restart(
    store: Store, task: Task, tmp_path: Path
) -> None:
    theirs = task_at(tmp_path / "theirs", "two")

    async def run() -> None:
        async with world(store, [task], uploads=tmp_path / "uploads") as here:
            got = await here.ada.send(calls.upload_task(packed(theirs.path)))
            assert (got.id, got.revision) == (theirs.id, theirs.revision)
            assert await here.ada.send(calls.upload_task(packed(theirs.path))) == got
            assert [t.id for t in await here.bob.send(calls.tasks())] == [task.id, theirs.id]
        async with world(store, [task], uploads=tmp_path / "uploads") as here:
            assert [t.id for t in await here.bob.send(calls.tasks())] == [task.id, theirs.id]

    asyncio.run(run())


def test_an_id_is_one_revision_for_ever(store: Store, task: Task, tmp_path: Path) -> None:
    changed = task_at(tmp_path / "changed", "one", exec_timeout_s=7)
    assert (changed.id, changed.revision != task.revision) == (task.id, True)

    async def run() -> None:
        async with world(store, [task], uploads=tmp_path / "uploads") as here:
            with pytest.raises((ConfigError, SandboxError), match="another name"):
                await here.ada.send(calls.upload_task(packed(changed.path)))
            assert not list((tmp_path / "uploads").iterdir())
            assert here.gateway.tasks[task.id] == task

    asyncio.run(run())


def test_what_is_no_package_is_refused_with_its_kind(store: Store, task: Task, tmp_path: Path) -> None:
    async def run() -> None:
        async with world(store, [task], uploads=tmp_path / "uploads") as here, here.raw() as http:
            for sent, status, code in (
                (b"not an archive", 422, "archive_format"),
                (b"", 422, "archive_format"),
                (bytes(MAX_FILE_BYTES + 1), 413, "too_large"),
            ):
                answer = await http.post("/v1/tasks", content=sent)
                told = wire.ErrorBody.model_validate(answer.json())
                assert (answer.status_code, told.code, told.owner) == (status, code, "caller")
                assert told.fix
        async with world(store, [task]) as here:
            with pytest.raises(ConfigError, match="takes no task packages"):
                await here.ada.send(calls.upload_task(b"x"))

    asyncio.run(run())
