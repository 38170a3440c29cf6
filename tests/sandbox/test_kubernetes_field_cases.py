"""What clusters do to pods of sandboxes, told by a server that is written down beforehand: webhooks, quotas,
namespaces that end, watches that say nonsense or end at once, an owner that somebody deleted."""

# ruff: noqa: ASYNC110  (waiting for what another task does is what these tests do)

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import SandboxError
from agentrl.types import SandboxSpec
from envs.sandbox import kubernetes, kubernetes_watch
from envs.sandbox.kubernetes import KubernetesBackend, _create_refused, _Start
from envs.sandbox.kubernetes_api import ApiRefused, Gone
from envs.sandbox.kubernetes_ends import start_problem
from envs.sandbox.kubernetes_pod import Wanted, altered, loosened, manifest, quantity
from envs.sandbox.kubernetes_watch import Pods
from envs.sandbox.pressure import Deadline

Json = dict[str, Any]


def refused(status: int, message: str) -> ApiRefused:
    return ApiRefused(message, status=status, reason="Forbidden", phase="create", pause_s=None)


def asked() -> Json:
    return manifest(
        Wanted(
            name="p",
            image="some/image:1",
            spec=SandboxSpec(image="x", memory_mib=256, disk_mib=64, cpus=1.0),
            labels={},
            annotations={},
            owner={"name": "o", "uid": "u"},
            token_sha256="0" * 64,
            lease_s=60.0,
            max_life_s=3600.0,
        )
    )


# ------------------------------------------------------------------------- a pod that is not what was asked


def served(pod: Json) -> Json:
    """As a server gives it back that changes nothing: its own spelling of amounts, and its defaults."""
    made = copy.deepcopy(pod)
    made["spec"]["schedulerName"] = "default-scheduler"
    for container in made["spec"]["containers"]:
        for amounts in container["resources"].values():
            amounts["cpu"] = "1" if amounts["cpu"] == "1000m" else amounts["cpu"]
            amounts["memory"] = str(int(quantity(amounts["memory"])))
        container["terminationMessagePath"] = "/dev/termination-log"
    return made


def test_amounts_are_read_as_clusters_write_them() -> None:
    said = {"1": 1.0, "250m": 0.25, "1Ki": 1024.0, "1.5Gi": 1.5 * 2**30, "1e3": 1e3, "2E": 2e18, "0": 0.0}
    said |= {"128974848": 128974848.0, "129M": 129e6, "5n": 5e-9, "1Ei": 2.0**60}
    assert {text: quantity(text) for text in said} == pytest.approx(said)
    for text in ("", "1X", "Mi", "1 Gi", "-", "1KiB"):
        with pytest.raises(ValueError, match="no quantity"):
            quantity(text)


def test_a_pod_that_came_back_as_it_was_asked_is_believed() -> None:
    made = served(asked())
    made["spec"]["containers"][0]["image"] = "mirror.local/some/image:1"
    assert altered(asked(), made) is None
    assert loosened(asked(), made) == frozenset()


def _sandbox(pod: Json) -> Json:
    return next(c for c in pod["spec"]["containers"] if c["name"] == "sandbox")


CHANGES: dict[str, tuple[Callable[[Json], object], str]] = {
    "a sidecar": (lambda p: p["spec"]["containers"].append({"name": "istio-proxy"}), "istio-proxy"),
    "an init container": (
        lambda p: p["spec"].update(initContainers=[{"name": "linkerd-init"}]),
        "linkerd-init",
    ),
    "less memory": (lambda p: _sandbox(p)["resources"]["limits"].update(memory="64Mi"), "64Mi"),
    "less of a core": (lambda p: _sandbox(p)["resources"]["limits"].update(cpu="100m"), "100m"),
    "a restart": (lambda p: p["spec"].update(restartPolicy="Always"), "restartPolicy"),
    "a token of the cluster": (lambda p: p["spec"].update(automountServiceAccountToken=True), "automount"),
    "the network of its node": (lambda p: p["spec"].update(hostNetwork=True), "hostNetwork"),
    "shared processes": (lambda p: p["spec"].update(shareProcessNamespace=True), "shareProcessNamespace"),
    "another user": (lambda p: _sandbox(p)["securityContext"].update(runAsUser=1000), "runAsUser"),
    "more rights": (lambda p: _sandbox(p)["securityContext"].update(privileged=True), "privileged"),
    "fewer rights": (
        lambda p: _sandbox(p)["securityContext"].update(capabilities={"drop": ["ALL"]}),
        "capabilities",
    ),
    "another program": (lambda p: _sandbox(p).update(command=["sh"]), "command"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_webhook_makes_of_a_pod_is_found_before_anything_runs_in_it(name: str) -> None:
    """A smaller limit would be told as the policy's own running out; a sidecar as a start that never ends."""
    change, word = CHANGES[name]
    made = served(asked())
    change(made)
    why = altered(asked(), made)
    assert why is not None
    assert word in why


def test_a_limit_that_was_widened_or_taken_away_is_not_claimed() -> None:
    made = served(asked())
    limits = _sandbox(made)["resources"]["limits"]
    limits["memory"] = "64Gi"
    del limits["cpu"]
    assert altered(asked(), made) is None
    assert loosened(asked(), made) == {"memory", "cpu"}


# ------------------------------------------------------------------------------------ refusals, by their name

REFUSALS = {
    "exceeded quota: q, requested: pods=1, used: pods=5": ("quota", True),
    "unable to create new content in namespace x because it is being terminated": ("namespace_ending", False),
    'admission webhook "v.kyverno.svc" denied the request: no': ("admission_refused", False),
    "pods is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi": ("limit_range", False),
    'violates PodSecurity "restricted:latest": unrestricted capabilities': ("forbidden", False),
    "no PriorityClass with name x was found": ("forbidden", False),
    'pod rejected: RuntimeClass "gvisor" not found': ("forbidden", False),
    "User cannot create resource pods": ("api_403", False),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_a_refusal_says_what_to_do_about_it(message: str) -> None:
    code, retryable = REFUSALS[message]
    error = _create_refused(refused(403, message), "space")
    assert (error.code, error.retryable, error.owner) == (code, retryable, "environment")
    assert error.fix
    assert message in str(error)


WAITING = {
    "SignatureValidationFailed": "image_pull",
    "RegistryUnavailable": "image_pull",
    "ImageInspectError": "image_pull",
    "ErrImageNeverPull": "image_pull",
    "PostStartHookError": "start_refused",
    "CrashLoopBackOff": "start_refused",
}


@pytest.mark.parametrize("reason", WAITING)
def test_a_container_that_will_never_run_is_not_waited_for(reason: str) -> None:
    waits = {"name": "sandbox", "image": "i", "state": {"waiting": {"reason": reason, "message": "m"}}}
    status = {"phase": "Pending", "containerStatuses": [waits]}
    end = start_problem({"metadata": {"name": "p", "uid": "u"}, "spec": {}, "status": status})
    assert end is not None
    assert end.code == WAITING[reason]


# ------------------------------------------------------------------------------------- a server from a script


class Told:
    """A cluster that answers what it was told to; an exception is raised, a callable asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str]] = []

    async def call(self, method: str, path: str, **_: Any) -> Json:
        self.asked.append((method, path))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    insist = call


def backend(tmp_path: Path, cluster: Told) -> KubernetesBackend:
    made = KubernetesBackend(tmp_path)
    made._cluster = cluster  # type: ignore[assignment]
    made._namespace = "space"
    return made


QUOTA = "pods is forbidden: exceeded quota: q, requested: pods=1, used: pods=5, limited: pods=5"


def test_a_quota_is_waited_for_while_one_of_ours_may_end_and_named_otherwise(tmp_path: Path) -> None:
    """As a node without room is: a session that waits is not a session that failed."""

    async def run() -> None:
        full = backend(tmp_path, Told(refused(403, QUOTA)))
        with pytest.raises(SandboxError) as caught:
            async with Deadline(5.0) as deadline:
                await full._create_pod(_Start("p", deadline), {})
        assert caught.value.code == "quota"
        busy = backend(tmp_path, Told(refused(403, QUOTA), refused(403, QUOTA), {"made": True}))
        busy._live["other"] = None  # type: ignore[assignment]
        async with Deadline(0.3) as deadline:  # shorter than the wait, which is not its own
            assert await busy._create_pod(_Start("p", deadline), {}) == {"made": True}

    asyncio.run(run())


def test_what_pods_belong_to_is_made_again_when_it_is_gone(tmp_path: Path) -> None:
    """After a night of sleep another process has swept it: without it every later pod goes at once."""
    made = {"metadata": {"name": "agentrl-x", "uid": "new"}}
    cluster = Told(refused(404, "configmaps not found"), made)
    one = backend(tmp_path, cluster)
    one._owner = {"name": "agentrl-x", "uid": "old"}
    asyncio.run(one._say_alive())
    assert [method for method, _ in cluster.asked] == ["PATCH", "POST"]
    assert one._owner["uid"] == "new"


@pytest.mark.parametrize("off_s", [-7200, 7200])
def test_who_has_another_time_sweeps_nobody_who_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off_s: int
) -> None:
    """Machines differ by hours, or are set; what counts is the clock of the server that all write to."""
    server = int(time.time())

    def stamp(seconds: int) -> str:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    made = {"name": "agentrl-x", "uid": "u", "creationTimestamp": stamp(server - 86_400)}
    made_at = {"metadata": {**made, "managedFields": [{"time": stamp(server)}, {"manager": "no time"}]}}

    def sweeping(until: int) -> Told:
        neighbour = {"metadata": {"name": "n", "annotations": {"agentrl/alive-until": str(until)}}}
        return Told(made_at, {"said again": True}, {"items": [neighbour]}, {})

    genuine = time.time
    monkeypatch.setattr(time, "time", lambda: genuine() + off_s)

    async def run() -> None:
        lives = backend(tmp_path, sweeping(server + 60))
        await lives._make_owner()
        assert abs(int(lives._alive_until()) - server - kubernetes.LEASE_S) < 60
        assert await lives.reap() == 0
        dead = backend(tmp_path, sweeping(server - 3600))
        await dead._make_owner()
        assert await dead.reap() == 1

    asyncio.run(run())


class Watched:
    """A cluster whose list is always the same, and whose watches are given; then they are silent."""

    def __init__(self, *watches: list[Any]) -> None:
        self.watches = list(watches)
        self.times = 0

    async def call(self, *_: Any, **__: Any) -> Json:
        return {"items": [named("a")], "metadata": {"resourceVersion": "1"}}

    async def watch(self, *_: Any, **__: Any) -> Any:
        self.times += 1
        for event in self.watches.pop(0) if self.watches else [asyncio.Event()]:
            if isinstance(event, asyncio.Event):
                await event.wait()
            if isinstance(event, Exception):
                raise event
            yield event


def named(name: str, **status: Any) -> Json:
    return {"metadata": {"name": name, "uid": name, "resourceVersion": "2"}, "spec": {}, "status": status}


NONSENSE = [
    {"type": "MODIFIED", "object": {"metadata": {"resourceVersion": "3"}}},
    {"type": "MODIFIED", "object": {}},
    {"type": "MODIFIED", "object": None},
    {"object": named("a")},
    {"type": "ADDED", "object": "text"},
]


@pytest.mark.parametrize("event", NONSENSE)
def test_a_watch_that_says_nonsense_is_begun_again_and_never_falls_silent(event: Any) -> None:
    good = {"type": "MODIFIED", "object": named("a", phase="Failed")}

    async def run() -> None:
        server = Watched([event], [good, asyncio.Event()])
        pods = Pods(server, "/pods", "x")  # type: ignore[arg-type]
        heard: list[Any] = []
        pods.listen("a", lambda now: heard.append(now and now["status"].get("phase")))
        pods.start()
        async with asyncio.timeout(10):
            while "Failed" not in heard:
                await asyncio.sleep(0.01)
        await pods.close()

    asyncio.run(run())


@pytest.mark.parametrize("end", ["in good order", "gone"])
def test_a_server_that_ends_every_watch_at_once_is_asked_less_and_less(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(kubernetes_watch, "MAX_PAUSE_S", 0.4)
    server = Watched(*([[] if end == "in good order" else [Gone()]] * 1000))

    async def run() -> None:
        pods = Pods(server, "/pods", "x")  # type: ignore[arg-type]
        pods.start()
        await asyncio.sleep(1.0)
        await pods.close()

    asyncio.run(run())
    assert 1 < server.times < 10


def test_a_start_that_was_never_allowed_says_what_the_server_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = refused(500, "Internal error occurred: failed calling webhook: no endpoints")

    async def run() -> None:
        one = backend(tmp_path, Told(*[busy] * 1000))

        async def nothing() -> None:
            pass

        async def start(start: _Start, *_: Any) -> Any:
            start.phase = "create"
            return await one._create_pod(start, {})

        async def require(_: str) -> Any:
            return None

        monkeypatch.setattr(one, "_open", nothing)
        monkeypatch.setattr(one, "_start", start)
        monkeypatch.setattr(one._images, "require", require)
        spec = SandboxSpec(image="x", memory_mib=64, disk_mib=16)
        with pytest.raises(SandboxError, match="failed calling webhook") as caught:
            await one.create(spec, image="x", session="s", deadline_s=0.5)
        assert (caught.value.code, caught.value.phase) == ("start_timeout", "create")

    asyncio.run(run())
