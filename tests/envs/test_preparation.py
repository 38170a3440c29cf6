"""Images of tasks made ready ahead: one status each, and one bad image ends no other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import SandboxError
from agentrl.types import Task
from envs import session as sessions
from envs.preparation import ImageStatus, images_of, prepare_images, require_all
from envs.sandbox.contract import Isolation
from envs.sandbox.plain import PlainBackend
from envs.tasks import package


def a_task(folder: Path, name: str, image: str | None = None) -> Task:
    package.write_task(
        folder / name,
        config={
            "task": {"name": f"small/{name}"},
            "environment": {} if image is None else {"docker_image": image},
            "metadata": {"agentrl": {"grader": "script"}},
        },
        instruction="Do it.\n",
        environment={} if image is not None else {"hello.txt": f"{name}\n"},
        tests={"test.sh": "true\n"},
        solution="#!/bin/bash\ntrue\n",
    )
    return package.load_task(folder / name)


class Registry:
    """A backend of images by name: `wrong` says what is raised for which, and how often."""

    name = "registry"
    isolation: Isolation = "docker"

    def __init__(self, **wrong: list[Exception]) -> None:
        self.wrong = wrong
        self.asked: list[str] = []
        self.started: list[str] = []
        self.there: set[str] = set()
        self.busy = self.most_busy = 0

    async def has(self, environment_dir: str) -> bool:
        return environment_dir in self.there

    async def prepare(self, environment_dir: str) -> str:
        self.asked.append(environment_dir)
        self.busy += 1
        self.most_busy = max(self.busy, self.most_busy)
        await asyncio.sleep(0.001)
        self.busy -= 1
        errors = self.wrong.get(environment_dir)
        if errors:
            raise errors.pop(0)
        self.there.add(environment_dir)
        return f"image:{environment_dir}"

    async def create(self, spec: Any, *, image: str, **_: Any) -> Any:
        self.started.append(image)
        return self

    async def close(self) -> None: ...


class Cluster(Registry):
    """Fetches when it starts; everything is started from one base."""

    async def pulled_for(self, digest: str) -> str:
        return "base"


def limited() -> SandboxError:
    return SandboxError("It asks for fewer.", fix="Log in.", code="pull_limited", phase="pull")


def test_tasks_of_one_image_are_one_status_and_a_task_without_a_sandbox_is_none(tmp_path: Path) -> None:
    tasks = [a_task(tmp_path, "a", "x:1"), a_task(tmp_path, "b", "y:1"), a_task(tmp_path, "c", "x:1")]
    assert [[t.id for t in sharing] for sharing in images_of(tasks)] == [["small/a", "small/c"], ["small/b"]]
    backend = Registry()
    backend.there.add("y:1")
    heard: list[ImageStatus] = []
    statuses = asyncio.run(prepare_images(tasks, backend, heard=heard.append))
    assert sorted(backend.asked) == ["x:1", "y:1"]
    assert [(s.image, s.tasks, s.state, s.digest, s.was_there) for s in statuses] == [
        ("x:1", ("small/a", "small/c"), "ready", "image:x:1", False),
        ("y:1", ("small/b",), "ready", "image:y:1", True),
    ]
    assert sorted(s.image for s in heard) == ["x:1", "y:1"]
    assert backend.started == []


def test_one_bad_image_ends_no_other_and_is_told_with_whose_fault_it_is_and_what_to_do(
    tmp_path: Path,
) -> None:
    bug = RuntimeError("oops")
    backend = Registry(**{"a:1": [limited(), limited()], "b:1": [bug, bug], "c:1": [OSError(5, "I/O")] * 2})
    tasks = [a_task(tmp_path, name, f"{name}:1") for name in "abcd"] + [a_task(tmp_path, "e", "oci:")]
    statuses = {s.image: s for s in asyncio.run(prepare_images(tasks, backend))}
    assert {image: (s.state, s.owner, s.code, s.retryable) for image, s in statuses.items()} == {
        "a:1": ("failed", "environment", "pull_limited", True),
        "b:1": ("failed", "environment", "backend_error", False),
        "c:1": ("failed", *_fault_of_the_system()),
        "d:1": ("ready", None, None, None),
        "oci:": ("failed", "task", "bad_image", False),
    }
    assert all(s.message and s.fix for s in statuses.values() if s.code in ("pull_limited", "backend_error"))
    assert backend.asked.count("a:1") == 1, "a registry that asks for fewer is not asked again"


def _fault_of_the_system() -> tuple[str, str, bool]:
    error = sessions.of_system(OSError(5, "I/O"), "prepare")
    return error.owner, error.code, error.retryable


def test_what_may_pass_is_tried_once_more(tmp_path: Path) -> None:
    backend = Registry(**{"a:1": [SandboxError("The engine hung up.", code="engine_cut")]})
    (status,) = asyncio.run(prepare_images([a_task(tmp_path, "a", "a:1")], backend))
    assert (status.state, backend.asked) == ("ready", ["a:1", "a:1"])


def test_no_more_are_prepared_at_once_than_asked_for(tmp_path: Path) -> None:
    backend = Registry()
    tasks = [a_task(tmp_path, f"t{n}", f"i{n}:1") for n in range(7)]
    asyncio.run(prepare_images(tasks, backend, at_once=2))
    assert backend.most_busy == 2


def test_on_a_cluster_one_sandbox_of_each_image_that_it_pulls_is_started(tmp_path: Path) -> None:
    tasks = [a_task(tmp_path, f"t{n}", f"i{n}:1") for n in range(3)]
    cluster, engine = Cluster(), Registry()
    asyncio.run(prepare_images(tasks, cluster))
    asyncio.run(prepare_images(tasks, engine, start=True))
    assert len(cluster.started) == 1
    assert sorted(engine.started) == ["image:i0:1", "image:i1:1", "image:i2:1"]


def test_a_folder_is_prepared_as_every_session_prepares_it(tmp_path: Path) -> None:
    task = a_task(tmp_path, "a")

    async def run() -> None:
        backend = PlainBackend(tmp_path / "state")
        (status,) = await prepare_images([task], backend)
        assert status.digest == await sessions.prepare(task, backend)
        assert status.digest is not None
        assert status.digest.startswith("dir:")
        await backend.close()

    asyncio.run(run())


def test_what_is_missing_is_one_error_that_lists_all_of_it(tmp_path: Path) -> None:
    tasks = [a_task(tmp_path, f"t{n}", f"i{n}:1") for n in range(13)]
    backend = Registry(**{f"i{n}:1": [limited()] for n in range(12)})
    statuses = asyncio.run(prepare_images(tasks, backend))
    with pytest.raises(SandboxError) as caught:
        require_all(statuses)
    said = caught.value
    assert (said.code, said.owner, said.retryable) == ("images_missing", "environment", True)
    assert "12 of 13 images" in said.message
    assert all(f"i{n}:1 (pull_limited, needed by small/t{n})" in said.message for n in range(10))
    assert "and 2 more" in said.message
    assert (said.fix or "").count("Log in.") == 1
    require_all([status for status in statuses if status.state == "ready"])
