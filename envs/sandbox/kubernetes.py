"""Sandboxes as bare pods of a Kubernetes cluster, from inside it or from anywhere that has its kubeconfig.

The API server is asked to make, to watch and to delete pods; everything else goes to the pod's witness (see
`kubernetes_witness`), over connections that exist only while something is asked. So a slow, restarting or
unreachable API server stops no command from inside the cluster, and costs one from outside nothing but time.

A backend may outlive its process (see `adoption`): then its id, its ConfigMap and its tokens are those of its
owner, and the next process with the same owner and state folder takes up the pods.

Invariants: a pod whose creation was answered by nobody is found again by its name, never made twice; every
end is classified by `kubernetes_ends` and never by what a program printed; whatever was made is deleted, at
once or by retries that `leaked` counts. All pods of one backend belong to one ConfigMap that says how long
their backend is alive: when it says so no longer, any other backend deletes it, and the cluster its pods.
Without any of them each pod ends itself: its witness when its lease is over, the kubelet after `max_life_s`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import itertools
import os
import re
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from agentrl.config import environment
from agentrl.errors import BoundaryError, ExecUnknown, SandboxError, SandboxLost
from agentrl.types import JsonScalar, SandboxSpec, from_json, to_json
from envs.sandbox import agent, docker_init, kubernetes_fence, kubernetes_witness, trees
from envs.sandbox.contract import FileChange, Isolation, Mount, SandboxInfo
from envs.sandbox.diff import DiffTooLarge, record
from envs.sandbox.kubernetes_api import ApiRefused, ApiUnknown, Cluster, Json
from envs.sandbox.kubernetes_ends import DELETED, WITNESS, end_of, ended, image_ids, ready, start_problem
from envs.sandbox.kubernetes_ends import unschedulable as why_unschedulable
from envs.sandbox.kubernetes_images import Archive, KubernetesImages, Prepared
from envs.sandbox.kubernetes_line import Dropped, ExecWire, Line, Received, Wire, dial_tcp
from envs.sandbox.kubernetes_pod import (
    LABEL,
    PORT,
    SIZED_SINCE,
    TOOLS,
    Placement,
    Wanted,
    altered,
    loosened,
    manifest,
)
from envs.sandbox.kubernetes_watch import Pods
from envs.sandbox.live import LiveSandbox
from envs.sandbox.pressure import QUEUE_DEADLINE_S, Deadline, Pressure, not_ready, waited_in_vain
from envs.sandbox.warm import Kind, PoolState, WarmPool

T = TypeVar("T")

CREATES_AT_ONCE = 16
LEASE_S = 600.0
"""A pod that hears nothing for this long ends itself; it is told something every third of it."""
MAX_LIFE_S = 6 * 3600.0
"""The kubelet ends any pod after this."""
REAP_SLACK_S = 120.0
"""How much later than it said a backend is taken for dead: clocks differ."""
UNSCHEDULABLE_S = 30.0
"""How long a pod may wait for a node that takes it, while no other sandbox of ours lives and could make
room; else it may wait for all of its deadline."""
DOUBT_S = 5.0
"""Without news of a pod that somebody waits for, its list is asked for."""
TRY_S = 15.0
CHECK_DEADLINE_S = 15.0
LOOK_DEADLINE_S = 5.0
POST_MORTEM_S = 2.5
DIFF_DEADLINE_S = 120.0
DELETE_DEADLINE_S = 60.0
WARM_AGE_S = 3600.0
"""A pod that waited longer for somebody who asks for it is ended."""
WARM_DEADLINE_S = 120.0
HAND_OUT_DEADLINE_S = 5.0
"""For the cluster to give away a pod that waited, and for that to show that it is as it was."""
GONE_S = 30.0
"""How long a deleted pod may take to disappear before the deletion is asked for again."""
CLOSE_DEADLINE_S = 60.0
RENEWALS_AT_ONCE = 8
PUT_BYTES = 192 * 1024
PUTS_AT_ONCE = 16
_TAKEN = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "proc", "dev", "etc", "sys", "")
_ALIVE = "agentrl/alive-until"
_SESSION, _IMAGE, _SPEC, _LIMITS = (f"agentrl/{word}" for word in ("session", "image", "spec", "limits"))
_RIGHTS = (
    ("pods", "", ("create", "get", "list", "watch", "patch", "delete")),
    ("configmaps", "", ("create", "list", "patch", "delete")),
)
_EXEC_RIGHTS = (("pods", "exec", ("get", "create")),)


class KubernetesBackend:
    """See `contract.Backend`. Belongs to one event loop.

    `state_dir` holds copies of workspaces. `base_image` (default: `AGENTRL_KUBERNETES_IMAGE`) lies under
    environment folders that bring only files. `server` replaces the API server's address of the kubeconfig.
    """

    def __init__(
        self,
        state_dir: Path | None = None,
        *,
        placement: Placement | None = None,
        base_image: str | None = None,
        context: str | None = None,
        kubeconfig: str | None = None,
        server: str | None = None,
        lease_s: float = LEASE_S,
        max_life_s: float = MAX_LIFE_S,
        creates_at_once: int = CREATES_AT_ONCE,
        unschedulable_s: float = UNSCHEDULABLE_S,
        watch_silence_s: float | None = None,
        idle_s: float | None = None,
    ) -> None:
        state = (state_dir or Path.home() / ".local" / "state" / "agentrl").absolute() / "kubernetes"
        self._placement = placement or Placement.from_environment()
        self._where: dict[str, Any] = {
            "context": context or environment("KUBERNETES_CONTEXT"),
            "kubeconfig": kubeconfig,
            "server": server,
        }
        self._cluster = Cluster(**self._where)
        self._images = KubernetesImages(state, base_image=base_image, shares_engine=self._shares_engine)
        self.id = os.urandom(6).hex()
        self.pressure = Pressure(creates_at_once)
        self._lease_s = lease_s
        self._max_life_s = max_life_s
        self._unschedulable_s = unschedulable_s
        self._watching = {} if watch_silence_s is None else {"silence_s": watch_silence_s}
        self._lines = {} if idle_s is None else {"idle_s": idle_s}
        self._state = state
        self._secret = os.urandom(32)
        self._process = ""
        """Part of a pod's name, where several processes make pods of the same backend."""
        self._numbers = itertools.count(1)
        self._live: dict[str, tuple[LiveSandbox, Line]] = {}
        self._wires: set[ExecWire] = set()
        self._removals: dict[str, asyncio.Task[None]] = {}
        self._failed_removals: set[str] = set()
        self._seen_images: dict[str, set[str]] = {}
        self._opening = asyncio.Lock()
        self._pods: Pods | None = None
        self._owner: dict[str, str] = {}
        self._ahead_s = 0.0
        """How much later it is for the server: the one clock that all who sweep agree on."""
        self._sized = True
        self._namespace = ""
        self._tasks: list[asyncio.Task[Any]] = []
        self._pool: WarmPool[_Launched] | None = None
        self._waiting: set[Line] = set()
        """Of pods that were started ahead."""

    @property
    def name(self) -> str:
        return "kubernetes"

    @property
    def isolation(self) -> Isolation:
        return "kubernetes"

    @property
    def time_multiplier(self) -> float:
        """See `contract.Slower`: of the placement's RuntimeClass."""
        return self._placement.time_multiplier

    @property
    def leaked(self) -> int:
        """Pods whose deletion has failed and is being tried again."""
        return len(self._failed_removals)

    @property
    def reach(self) -> str:
        """How witnesses are reached: `pod` or `exec`."""
        if self._placement.reach != "auto":
            return self._placement.reach
        return "pod" if self._cluster.inside else "exec"

    @property
    def pods(self) -> Pods:
        """What is known of this backend's pods. After the first `create`."""
        assert self._pods is not None
        return self._pods

    @property
    def connections(self) -> int:
        """How many sandboxes have a connection open now."""
        return sum(line.connected for _, line in self._live.values())

    def check(self) -> None:
        """Ask the cluster, waiting for it, whether sandboxes can be made. Raises `SandboxError` with the
        fix."""
        _apart(examine(self._placement, **self._where))

    async def prepare(self, environment_dir: str) -> str:
        return await self._images.prepare(environment_dir)

    async def pulled_for(self, digest: str) -> str:
        """See `contract.Pulling`."""
        return (await self._images.require(digest)).image

    async def create(
        self,
        spec: SandboxSpec,
        *,
        image: str,
        session: str,
        mounts: tuple[Mount, ...] = (),
        apply: tuple[FileChange, ...] = (),
        deadline_s: float = 120.0,
    ) -> LiveSandbox:
        begun = time.monotonic()
        _check_spec(spec, mounts)
        prepared = await self._images.require(image)
        sandbox = None
        if self._pool is not None and not mounts:
            sandbox = await self._handed_out(self._pool, spec, image, session, begun)
        if sandbox is None:
            start = _Start(self._new_name(), self._deadline(deadline_s))
            launched = await self._launch(start, spec, image, prepared, session, mounts, deadline_s)
            sandbox = self._alive(launched, begun)
        return await sandbox.beginning_with(apply, deadline_s=deadline_s)

    def _deadline(self, seconds: float) -> Deadline:
        return Deadline(seconds, queue_s=self.time_multiplier * QUEUE_DEADLINE_S)

    def _new_name(self) -> str:
        return f"agentrl-{self.id}-{self._process}{next(self._numbers)}"

    async def _launch(
        self,
        start: _Start,
        spec: SandboxSpec,
        image: str,
        prepared: Prepared,
        session: str,
        mounts: tuple[Mount, ...],
        deadline_s: float,
    ) -> _Launched:
        """A pod whose agent has answered, within the deadline."""
        try:
            async with start.deadline:
                await self._open()
                return await self._start(start, spec, image, prepared, session, mounts)
        except TimeoutError as error:
            if start.deadline.queued:
                raise waited_in_vain(start.name) from error
            if start.no_node is not None:
                raise _no_node(start.name, start.no_node) from error
            if start.said is not None and start.phase == "create":
                raise SandboxError(
                    f"The cluster did not make sandbox {start.name} within {deadline_s:g} s;"
                    f" it said: {start.said}",
                    fix="See what it says; where it is overloaded start fewer sandboxes at once.",
                    code="start_timeout",
                    phase="create",
                ) from error
            raise not_ready(
                start.name, deadline_s, phase=start.phase, place="cluster", more=", or add nodes"
            ) from error

    async def close(self) -> None:
        if self._pool is not None:
            for waiting in await self._pool.stop():
                self._alive(waiting, time.monotonic())  # Ended with the others.
        await asyncio.gather(*(sandbox.close() for sandbox, _ in list(self._live.values())))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._removals:
            await asyncio.wait(self._removals.values(), timeout=CLOSE_DEADLINE_S)
        left = [task for task in self._removals.values() if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, *(wire.finished() for wire in list(self._wires)), return_exceptions=True)
        if self._owner:
            with contextlib.suppress(ApiRefused, ApiUnknown):  # It says how long we live: another will do it.
                await self._cluster.insist(
                    "DELETE",
                    f"{self._path('configmaps')}/{self._owner['name']}",
                    phase="close",
                    deadline_s=LOOK_DEADLINE_S,
                    params={"propagationPolicy": "Background"},
                )
            self._owner = {}
        if self._pods is not None:
            await self._pods.close()
            self._pods = None
        await self._cluster.close()

    # -- started ahead: see `warm`

    def keep_warm(self, size: int) -> None:
        """See `warm.Warming`.

        A pod that waits belongs to nobody: its annotations name no session, so that whoever comes after this
        process ends it. To give it away is one PATCH of its metadata, whose answer is waited for and no
        watch; what is adopted is found by what that wrote. It keeps its PriorityClass: the scheduler is asked
        no more, and no class takes the place of a running pod. When no node has room for a sandbox that
        somebody waits for, those that wait give way. A sandbox that needs folders mounted beside its image is
        always made.
        """
        self._pool = None
        if size:
            self._pool = WarmPool(
                size,
                make=self._make_warm,
                end=self._end_warm,
                alive=lambda waiting: waiting.line.alive,
                max_age_s=min(WARM_AGE_S, self._max_life_s / 4),  # what is left of its life is its holder's
            )

    @property
    def pool(self) -> PoolState | None:
        return None if self._pool is None else self._pool.state

    async def _handed_out(
        self, pool: WarmPool[_Launched], spec: SandboxSpec, image: str, session: str, begun: float
    ) -> LiveSandbox | None:
        """A pod that waited, probed and given to the session; None: a miss."""

        async def give(found: _Launched) -> LiveSandbox | None:
            uid = found.pod["metadata"]["uid"]
            given = {"uid": uid, "labels": _labels(session), "annotations": {_SESSION: session}}
            path = f"{self._path('pods')}/{found.name}"
            now = await self._cluster.call(
                "PATCH", path, phase="adopt", deadline_s=HAND_OUT_DEADLINE_S, body={"metadata": given}
            )
            self.pods.note(now)
            seen, _ = await found.line.call({"op": "probe"}, deadline_s=HAND_OUT_DEADLINE_S)
            if end_of(now) is not None or seen.get("instance") != found.instance:
                return None
            return self._alive(found, begun, warm=True)

        async def end(found: _Launched) -> None:
            await self._alive(found, begun).close()

        return await pool.hand_out((image, to_json(spec).decode()), give, end)

    async def _make_warm(self, kind: Kind) -> _Launched:
        image, spec = kind[0], from_json(SandboxSpec, kind[1])
        prepared = await self._images.require(image)
        start = _Start(self._new_name(), self._deadline(WARM_DEADLINE_S), waits=True)
        try:
            made = await self._launch(start, spec, image, prepared, "", (), WARM_DEADLINE_S)
        except (BoundaryError, OSError):
            await self._removed(start.name)
            raise
        self._waiting.add(made.line)
        return made

    async def _end_warm(self, waiting: _Launched) -> None:
        await self._alive(waiting, time.monotonic()).close()
        await self._removed(waiting.name)

    async def _removed(self, name: str) -> None:
        """Wait until the cluster no longer has it, nor can still come to have it."""
        if (removal := self._removals.get(name)) is not None:
            await asyncio.wait({removal})

    # -- opening

    def _path(self, kind: str) -> str:
        return f"/api/v1/namespaces/{self._namespace}/{kind}"

    async def _open(self) -> None:
        """Once: learn about the cluster, make what the pods belong to, begin to watch, sweep what dead
        backends left."""
        async with self._opening:
            if self._pods is not None:
                return
            await self._cluster.connect()
            self._namespace = self._placement.namespace or self._cluster.default_namespace
            self._sized = _version(await self._ask("GET", "/version", "version")) >= SIZED_SINCE
            await self._make_owner()
            selector = f"{LABEL}.backend={self.id}"
            self._pods = Pods(self._cluster, self._path("pods"), selector, **self._watching)
            self._pods.start()
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._renew()), loop.create_task(_quiet(self.reap()))]

    async def _make_owner(self) -> None:
        """What our pods belong to, and take their tools from."""
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": f"agentrl-{self.id}",
                "labels": {LABEL: "backend", f"{LABEL}.backend": self.id},
                "annotations": {_ALIVE: self._alive_until()},
            },
            "data": await asyncio.to_thread(_tools),
        }
        try:
            made = await self._ask("POST", self._path("configmaps"), "open", body)
        except ApiRefused as refused:
            if refused.status != 409:
                raise _create_refused(refused, self._namespace) from refused
            # Ours: the answer was lost, or an earlier process of the same owner made it.
            made = await self._ask("PATCH", f"{self._path('configmaps')}/agentrl-{self.id}", "open", body)
        self._owner = {"name": made["metadata"]["name"], "uid": made["metadata"]["uid"]}
        self._ahead_s = _written_at(made) - time.time()
        if abs(self._ahead_s) > REAP_SLACK_S / 2:
            await self._say_alive()

    async def _say_alive(self) -> None:
        """Renew what our pods belong to. Where it is gone (this process slept longer than its lease, and
        another swept it; somebody deleted it) it is made anew, or every later pod would go at once."""
        body = {"metadata": {"annotations": {_ALIVE: self._alive_until()}}}
        path = f"{self._path('configmaps')}/{self._owner['name']}"
        try:
            await self._cluster.insist("PATCH", path, phase="lease", deadline_s=self._lease_s / 3, body=body)
        except ApiRefused as refused:
            if refused.status == 404:
                await self._make_owner()

    async def _ask(self, method: str, path: str, phase: str, body: Json | None = None) -> Json:
        return await self._cluster.insist(
            method, path, phase=phase, deadline_s=CHECK_DEADLINE_S * 2, body=body
        )

    def _alive_until(self) -> str:
        return str(int(time.time() + self._ahead_s + self._lease_s))

    async def _shares_engine(self) -> bool:
        """Whether the one node of the cluster is this machine, on its Docker engine."""
        try:
            nodes = await self._ask("GET", "/api/v1/nodes", "prepare")
            boot = await asyncio.to_thread(Path("/proc/sys/kernel/random/boot_id").read_text)
            facts = [node["status"]["nodeInfo"] for node in nodes["items"]]
        except (ApiRefused, OSError):
            return False
        return [f["bootID"] for f in facts] == [boot.strip()] and facts[0][
            "containerRuntimeVersion"
        ].startswith("docker://")

    # -- starting

    async def _start(
        self,
        start: _Start,
        spec: SandboxSpec,
        image: str,
        prepared: Prepared,
        session: str,
        mounts: tuple[Mount, ...],
    ) -> _Launched:
        archive = await self._images.archive(image, prepared, tuple(m.source for m in mounts))
        name, token = start.name, self._token(start.name)
        limits: tuple[str, ...] = ("memory", "pids", "cpu", "disk")
        limits += ("network",) if self._placement.fence == "pod" else ()
        wanted = Wanted(
            name=name,
            image=prepared.image,
            spec=spec,
            labels={
                LABEL: "sandbox",
                f"{LABEL}.backend": self.id,
                **_labels(session),
            },
            annotations={
                _SESSION: session,
                _IMAGE: image,
                _SPEC: to_json(spec).decode(),
                _LIMITS: ",".join(limits),
            },
            owner=self._owner,
            token_sha256=hashlib.sha256(token.encode()).hexdigest(),
            lease_s=self._lease_s,
            max_life_s=self._max_life_s,
            mounts=tuple(mount.target for mount in mounts),
            place_mib=archive.place_mib,
            by_network=self.reach == "pod",
            sized=self._sized,
            waits=start.waits,
            placement=self._placement,
        )
        line: Line | None = None
        try:
            start.phase = "create"
            asked = manifest(wanted)
            async with start.deadline.turn(self.pressure):
                pod = await self._create_pod(start, asked)
                why = altered(asked, pod)
                if why is not None:
                    raise _altered(name, why)
                wider = loosened(asked, pod)
                limits = tuple(limit for limit in limits if limit not in wider)
                pod = await self._await_ready(start, pod)
            self._pin_image(image, pod, name)
            start.phase = "agent"
            line = self._line(pod, token)
            await self._lay(line, archive, prepared, start)
            hello, _ = await line.call({"op": "hello"}, deadline_s=start.left())
        except BaseException as error:
            if line is not None:
                line.close()
            self.pods.forget(name)
            self._dispose(name, unsure=start.asked)
            if isinstance(error, SandboxLost):
                raise _at_start(error, start.phase) from error
            raise
        return _Launched(pod, line, hello["instance"], image, spec, limits)

    def _alive(self, launched: _Launched, begun: float, *, warm: bool = False) -> LiveSandbox:
        """The sandbox behind a line to its agent."""
        name, line = launched.name, launched.line
        self._waiting.discard(line)
        info = SandboxInfo(
            id=name,
            backend=self.name,
            isolation=self.isolation,
            image_digest=launched.image,
            instance=launched.instance,
            spec=launched.spec,
            limits_enforced=launched.limits,
            ready_ms=(time.monotonic() - begun) * 1000,
            warm=warm,
            time_multiplier=self.time_multiplier,
        )

        async def end() -> None:
            self._live.pop(name, None)
            self.pods.forget(name)
            self._dispose(name, line)

        sandbox = LiveSandbox(info, line, differ=lambda: self._diff(line, name), end=end)
        self._live[name] = (sandbox, line)
        return sandbox

    # -- outliving this process: see `adoption`

    def outlive(self, owner: str) -> None:
        self.id = "o" + hashlib.sha256(owner.encode()).hexdigest()[:11]
        self._process = os.urandom(3).hex()
        self._secret = _kept_secret(self._state / "owners" / f"{self.id}.key")

    async def adopt(self, session: str) -> LiveSandbox | None:
        begun = time.monotonic()
        await self._open()
        await self.pods.look()
        for name in self.pods.names():
            pod = self.pods.get(name)
            if pod is None or name in self._live or name in self._removals:
                continue
            said = pod["metadata"].get("annotations") or {}
            if not session or said.get(_SESSION) != session or not ready(pod) or end_of(pod) is not None:
                continue
            line = self._line(pod, self._token(name))
            try:
                hello, _ = await line.call({"op": "hello"}, deadline_s=CHECK_DEADLINE_S)
            except SandboxError:  # It is ending, or not ours: `forget` gives it back.
                line.close()
                self.pods.forget(name)
                continue
            found = _Launched(
                pod,
                line,
                hello["instance"],
                said[_IMAGE],
                from_json(SandboxSpec, said[_SPEC]),
                tuple(said[_LIMITS].split(",")),
            )
            return self._alive(found, begun)
        return None

    async def forget(self) -> int:
        await self._open()
        await self.pods.look()
        mine = f"agentrl-{self.id}-{self._process}"
        left = [n for n in self.pods.names() if not n.startswith(mine) and n not in self._live]
        for name in left:
            self._dispose(name)
        return len(left)

    def _token(self, name: str) -> str:
        return hashlib.sha256(self._secret + name.encode()).hexdigest()

    async def _create_pod(self, start: _Start, body: Json) -> Json:
        """Create it exactly once: after an answer that was lost, whatever has this name is ours."""
        pause = 0.2
        start.asked = True
        while True:
            wait_s = pause
            try:
                return await self._cluster.call(
                    "POST",
                    self._path("pods"),
                    phase="create",
                    deadline_s=min(TRY_S, start.left()),
                    body=body,
                )
            except ApiUnknown:
                found = await self._find(start)
                if found is not None:
                    return found
            except ApiRefused as refused:
                start.said = refused.message
                if refused.reason == "AlreadyExists":
                    found = await self._find(start)
                    if found is not None:
                        return found
                elif _over_quota(refused) and await self._made_room(start):
                    pass
                elif _over_quota(refused) and not start.waits and (self._live or self._removals):
                    start.deadline.postpone(pause)  # Room comes when one of ours ends.
                elif refused.passing:
                    wait_s = refused.pause_s or pause
                elif refused.status == 409:
                    pass  # Somebody else changed the quota at the same time.
                else:
                    raise _create_refused(refused, self._namespace) from refused
            await asyncio.sleep(wait_s)
            pause = min(2 * pause, 5.0)

    async def _made_room(self, start: _Start) -> bool:
        """Whether a pod that waits for nobody gave way to one that somebody waits for."""
        spare = None if start.waits or self._pool is None else self._pool.give_way()
        if spare is not None:
            await self._alive(spare, time.monotonic()).close()
        return spare is not None

    async def _find(self, start: _Start) -> Json | None:
        with contextlib.suppress(ApiUnknown, ApiRefused):
            return await self._cluster.call(
                "GET",
                f"{self._path('pods')}/{start.name}",
                phase="create",
                deadline_s=min(TRY_S, start.left()),
            )
        return None

    async def _await_ready(self, start: _Start, pod: Json) -> Json:
        """Wait, by the watch, until both containers run. Raises what `start_problem` finds."""
        start.phase = "schedule"
        name = start.name
        done: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        heard = time.monotonic()
        waits_since: float | None = None

        def listen(now: Json | None) -> None:
            nonlocal heard, waits_since
            heard = time.monotonic()
            if done.done():
                return
            if now is None:
                done.set_exception(DELETED.failed(name, start.phase))
                return
            problem = start_problem(now)
            if problem is not None:
                done.set_exception(problem.failed(name, start.phase))
            elif ready(now):
                done.set_result(now)
            start.no_node = why_unschedulable(now)
            if start.no_node is None:
                waits_since = None
                if now.get("spec", {}).get("nodeName"):
                    start.phase = "start"
            elif waits_since is None:
                waits_since = time.monotonic()

        self.pods.note(pod)
        self.pods.listen(name, listen)
        try:
            while not done.done():
                looked = time.monotonic()
                await asyncio.wait((done,), timeout=1.0)
                waited_s = 0.0 if waits_since is None else time.monotonic() - waits_since
                if start.no_node is not None and self._live:  # Room comes when one of ours ends.
                    start.deadline.postpone(time.monotonic() - looked)
                if start.no_node is not None and await self._made_room(start):
                    continue
                if start.no_node is not None and waited_s > self._unschedulable_s and not self._live:
                    raise _no_node(name, start.no_node)
                if time.monotonic() - heard > DOUBT_S and not done.done():
                    heard = time.monotonic()
                    with contextlib.suppress(ApiUnknown, ApiRefused):
                        await self.pods.look()
            return done.result()
        finally:
            if done.done() and not done.cancelled():
                done.exception()  # Whatever it is, it was heard.

    def _pin_image(self, image: str, pod: Json, name: str) -> None:
        """All sandboxes of one prepared image are started from the same image (E1)."""
        ids = image_ids(pod)
        known = self._seen_images.setdefault(image, ids)
        if ids != known or len(ids) != 1:
            raise SandboxError(
                f"Sandbox {name} was started from {sorted(ids)}, others of its image from {sorted(known)}.",
                fix="Name the image by its digest (name@sha256:…), so that it can not change under a run.",
                code="image_changed",
                phase="start",
                retryable=False,
            )

    def _line(self, pod: Json, token: str) -> Line:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        address = pod["status"]["podIP"]

        async def dial(received: Received, dropped: Dropped) -> Wire:
            if self.reach == "pod":
                return await dial_tcp(address, PORT, received, dropped)
            command = ["python3", "-I", "-S", f"{TOOLS}/kubernetes_witness.py", "relay"]
            wire = ExecWire(
                await self._cluster.exec(self._namespace, name, WITNESS, command), received, dropped
            )
            self._wires.add(wire)
            wire.whenever_finished(self._wires.discard)
            return wire

        line = Line(
            name,
            token=token,
            dial=dial,
            post_mortem=lambda: self._post_mortem(name),
            doubt=lambda: self._look_at(name),
            **self._lines,
        )

        def listen(now: Json | None) -> None:
            end = DELETED if now is None else end_of(now)
            if now is not None and now["metadata"]["uid"] != uid:
                end = DELETED
            if end is not None:
                line.lost(end.lost(name), witness_lives=end.witness_lives)

        self.pods.listen(name, listen)
        return line

    async def _lay(self, line: Line, archive: Archive, prepared: Prepared, start: _Start) -> None:
        """Bring what belongs into the pod, and have its workdir made."""
        if archive.path is not None:
            limit = asyncio.Semaphore(PUTS_AT_ONCE)

            async def put(offset: int, data: bytes) -> None:
                async with limit:
                    header = {"op": "witness.put", "offset": offset}
                    _checked(await line.call(header, data, deadline_s=start.left()), start)

            pieces = await asyncio.to_thread(_pieces, archive.path)
            await asyncio.gather(*(put(offset, data) for offset, data in pieces))
        header = {
            "op": "witness.lay",
            "size": archive.size,
            "sha256": archive.sha256,
            "files": prepared.files,
        }
        _checked(await line.call(header, deadline_s=start.left()), start)

    # -- while it lives

    async def _renew(self) -> None:
        """Say that we are alive: to the cluster for all pods together, to each witness that heard nothing
        lately."""
        limit = asyncio.Semaphore(RENEWALS_AT_ONCE)

        async def tell(line: Line) -> None:
            async with limit:
                await _quiet(line.renew())

        while True:
            await asyncio.sleep(self._lease_s / 3)
            lines = [*(line for _, line in self._live.values()), *self._waiting]
            silent = [line for line in lines if line.silent_s > self._lease_s / 4]
            await asyncio.gather(
                _quiet(self._say_alive()),
                *(tell(line) for line in silent),
            )

    async def _look_at(self, name: str) -> None:
        """One look at one pod, because something was odd about it."""
        try:
            pod = await self._cluster.call(
                "GET", f"{self._path('pods')}/{name}", phase="look", deadline_s=LOOK_DEADLINE_S
            )
        except ApiRefused as refused:
            if refused.status == 404 and self._pods is not None:
                self._pods.gone(name)
            return
        if self._pods is not None:
            self._pods.note(pod)

    async def _post_mortem(self, name: str) -> dict[str, JsonScalar]:
        """What the cluster knows of the end of an agent, in time: it hears of it a little later than the
        witness."""
        until = time.monotonic() + POST_MORTEM_S
        while True:
            with contextlib.suppress(ApiUnknown):
                await self._look_at(name)
            pod = None if self._pods is None else self._pods.get(name)
            end = None if pod is None else end_of(pod)
            if end is not None:
                return dict(end.evidence)
            if pod is None or time.monotonic() > until:
                return {"pod": name, "state": "gone" if pod is None else "unknown"}
            await asyncio.sleep(0.25)

    async def _diff(self, line: Line, name: str) -> tuple[FileChange, ...]:
        header, body = await line.call({"op": "witness.diff"}, deadline_s=DIFF_DEADLINE_S)
        problem = header.get("error")
        if problem is not None:
            if problem["kind"] == "diff_too_large":
                raise DiffTooLarge(problem["message"], phase="diff", evidence=problem["evidence"])
            raise SandboxError(
                f"The diff of sandbox {name} could not be taken: {problem['message']}.",
                code=f"diff_{problem['kind']}",
                phase="diff",
            )
        changes, at = [], 0
        for path, kind, mode, size in header["changes"]:
            content = None if size is None else body[at : at + size]
            at += size or 0
            changes.append(record(trees.Change(path, kind, mode, content)))
        if at != len(body):
            raise ExecUnknown(f"The diff of sandbox {name} arrived damaged.", code="answer_cut", phase="diff")
        return tuple(sorted(changes, key=lambda c: c.path))

    # -- ending

    def _dispose(self, name: str, line: Line | None = None, *, unsure: bool = False) -> None:
        """Delete a pod in the background, until it is gone."""
        if name not in self._removals:
            task = asyncio.get_running_loop().create_task(self._remove(name, line, 4 if unsure else 0))
            self._removals[name] = task
            task.add_done_callback(lambda _: self._removals.pop(name, None))

    async def _remove(self, name: str, line: Line | None, looks: int) -> None:
        """`looks`: how often an absent pod may still come, from a create that was given up.

        A pod whose containers have all ended, as the cluster says or over its own line the pod, needs its
        kubelet no more, and is taken from the list without it: the kubelet asks for that itself, but only
        every ten seconds, and if they ended before the deletion, after it has collected its garbage, up to a
        minute later. It also saves a kubelet the calls by which it reports an end: it may make few (five per
        second before Kubernetes 1.27), which is what bounds how many pods a node can start and end."""
        pause = 0.2
        told = line is not None and await line.over()
        while True:
            over = told or ended(self.pods.get(name))
            try:
                await self._cluster.call(
                    "DELETE",
                    f"{self._path('pods')}/{name}",
                    phase="delete",
                    deadline_s=TRY_S,
                    params={"gracePeriodSeconds": "0" if over else "1", "propagationPolicy": "Background"},
                )
                if await self._disappears(name, over):
                    break
                if not over and ended(self.pods.get(name)):
                    continue
                self._failed_removals.add(name)
            except ApiRefused as refused:
                if refused.status == 404:
                    if looks <= 0:
                        break
                    looks -= 1
                else:
                    self._failed_removals.add(name)
            except ApiUnknown:
                self._failed_removals.add(name)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 30.0)
        self._failed_removals.discard(name)

    async def _disappears(self, name: str, over: bool) -> bool:
        """Wait, by the watch, until a deleted pod is gone; or, unless it was `over` before, has ended."""
        heard = asyncio.Event()
        pods = self.pods
        if pods.get(name) is None:
            await _quiet(self._look_at(name))
        if pods.get(name) is None:
            return True
        pods.listen(name, lambda now: heard.set() if now is None or (ended(now) and not over) else None)
        try:
            async with asyncio.timeout(GONE_S):
                await heard.wait()
            return pods.get(name) is None
        except TimeoutError:
            await _quiet(self._look_at(name))
            return pods.get(name) is None
        finally:
            pods.forget(name)

    async def reap(self) -> int:
        """Delete what belongs to backends that no longer say that they live, pods and all; returns how many
        backends."""
        listed = await self._cluster.insist(
            "GET",
            self._path("configmaps"),
            phase="reap",
            deadline_s=CHECK_DEADLINE_S,
            params={"labelSelector": f"{LABEL}=backend"},
        )
        reaped = 0
        for found in listed["items"]:
            said = (found["metadata"].get("annotations") or {}).get(_ALIVE, "")
            if not said.isdigit() or time.time() + self._ahead_s < int(said) + REAP_SLACK_S:
                continue
            with contextlib.suppress(ApiUnknown, ApiRefused):
                await self._cluster.insist(
                    "DELETE",
                    f"{self._path('configmaps')}/{found['metadata']['name']}",
                    phase="reap",
                    deadline_s=CHECK_DEADLINE_S,
                    params={"propagationPolicy": "Background"},
                )
                reaped += 1
        return reaped


# ------------------------------------------------------------------------------------------------------------


def checked(state_dir: Path | None) -> KubernetesBackend:
    """A backend after its `check`."""
    backend = KubernetesBackend(state_dir)
    backend.check()
    return backend


async def examine(placement: Placement, **where: Any) -> dict[str, str]:
    """What a cluster allows: its version, the namespace, how pods would be reached. Raises `SandboxError`
    with the fix when sandboxes can not be made there."""
    cluster = Cluster(**where)
    try:
        await cluster.connect()
        version = await cluster.call("GET", "/version", phase="version", deadline_s=CHECK_DEADLINE_S)
        namespace = placement.namespace or cluster.default_namespace
        reach = placement.reach
        if reach == "auto":
            reach = "pod" if cluster.inside else "exec"
        rights = [*_RIGHTS, *(_EXEC_RIGHTS if reach == "exec" else ())]
        asked = [(kind, sub, verb) for kind, sub, verbs in rights for verb in verbs]
        answers = await asyncio.gather(*(_may(cluster, namespace, *what) for what in asked))
        lacking = [
            f"{verb} {kind}{'/' + sub if sub else ''}"
            for (kind, sub, verb), may in zip(asked, answers, strict=True)
            if not may
        ]
    finally:
        await cluster.close()
    if lacking:
        raise SandboxError(
            f"This account may not {', '.join(lacking)} in the namespace {namespace}.",
            fix="Give it the rights of deploy/kubernetes/rbac.yaml, or set AGENTRL_KUBERNETES_NAMESPACE.",
            code="forbidden",
            phase="prepare",
            retryable=False,
        )
    sized = "" if _version(version) >= SIZED_SINCE else "; disks are limited by the witness (SYS_ADMIN)"
    return {
        "version": str(version.get("gitVersion")),
        "namespace": namespace,
        "reach": reach,
        "disk": sized,
    }


def examined() -> dict[str, str]:
    """`examine` of the cluster that the environment names, for those without an event loop."""
    return _apart(examine(Placement.from_environment(), context=environment("KUBERNETES_CONTEXT")))


def _apart(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end in an event loop of its own, also where one is running."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


async def _may(cluster: Cluster, namespace: str, kind: str, sub: str, verb: str) -> bool:
    attributes = {"namespace": namespace, "resource": kind, "verb": verb}
    if sub:
        attributes["subresource"] = sub
    answer = await cluster.call(
        "POST",
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        phase="check",
        deadline_s=CHECK_DEADLINE_S,
        body={
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        },
    )
    return bool(answer["status"]["allowed"])


@dataclass(frozen=True, slots=True)
class _Launched:
    """A pod whose agent has answered: what of it becomes a sandbox."""

    pod: Json
    line: Line
    instance: str
    image: str
    spec: SandboxSpec
    limits: tuple[str, ...]

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])


class _Start:
    """One start under way: its pod's name, its deadline, and what it waits for."""

    def __init__(self, name: str, deadline: Deadline, *, waits: bool = False) -> None:
        self.name = name
        self.deadline = deadline
        self.waits = waits
        """Nobody waits for it: it is started ahead."""
        self.phase = "prepare"
        self.asked = False
        """The cluster may have made the pod, or may still be about to."""
        self.no_node: str | None = None
        """Why no node takes it, as the scheduler says; None when one did."""
        self.said: str | None = None
        """Why the server refused last to make it."""

    def left(self) -> float:
        return self.deadline.left()


def _written_at(made: Json) -> float:
    """When the server wrote an object last, by its own clock; by ours, when it does not say."""
    facts = made["metadata"]
    said = [entry.get("time") for entry in facts.get("managedFields") or ()]
    moments = []
    for text in (*said, facts.get("creationTimestamp")):
        with contextlib.suppress(TypeError, ValueError):
            moments.append(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else 0.0)
    return max(moments, default=0.0) or time.time()


async def _quiet(work: Coroutine[Any, Any, Any]) -> None:
    """For what is tried again by others, or later."""
    with contextlib.suppress(SandboxError, OSError):
        await work


def _kept_secret(path: Path) -> bytes:
    """What the tokens of an owner's pods are made from; made once, readable by this user only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(os.urandom(32))
    return path.read_bytes()


def _tools() -> dict[str, str]:
    modules = (agent, docker_init, kubernetes_fence, kubernetes_witness, trees)
    paths = [Path(str(module.__file__)) for module in modules]
    return {path.name: path.read_text() for path in paths}


def _pieces(path: Path) -> list[tuple[int, bytes]]:
    data = path.read_bytes()
    return [(at, data[at : at + PUT_BYTES]) for at in range(0, len(data), PUT_BYTES)]


def _version(facts: Json) -> tuple[int, int]:
    numbers = [re.match(r"\d+", str(facts.get(key))) for key in ("major", "minor")]
    major, minor = (int(found.group()) if found else 0 for found in numbers)
    return major, minor


def _label(text: str) -> str:
    """A session's id as a label's value: at most 63 characters of few kinds; the whole is an annotation."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", text)[:40].strip("._-")
    return f"{plain}.{hashlib.sha256(text.encode()).hexdigest()[:12]}".lstrip(".")


def _labels(session: str) -> dict[str, str]:
    """What changes of a pod's labels when it is given to a session; empty while it is nobody's."""
    return {f"{LABEL}.session": _label(session) if session else ""}


def _checked(answer: tuple[Json, bytes], start: _Start) -> None:
    problem = answer[0].get("error")
    if problem is None:
        return
    full = problem.get("errno") == 28
    raise SandboxError(
        f"The workdir of sandbox {start.name} could not be laid: {problem['message']}.",
        fix="Raise the task's disk limit: the workdir must fit in it." if full else "See the message.",
        code="workdir_too_large" if full else str(problem["kind"]),
        owner="task" if full or problem["kind"] == "workdir_too_large" else "environment",
        phase="agent",
        retryable=not full,
    )


def _at_start(error: SandboxLost, phase: str) -> SandboxError:
    return SandboxError(
        error.message,
        fix=error.fix,
        owner=error.owner,
        code=error.code,
        phase=phase,
        retryable=error.retryable,
        evidence=error.evidence,
    )


def _namespaced(refused: ApiRefused, namespace: str) -> SandboxError:
    if refused.status != 404:
        return refused
    return SandboxError(
        f"The cluster has no namespace {namespace}.",
        fix="Create it (deploy/kubernetes/namespace.yaml), or set AGENTRL_KUBERNETES_NAMESPACE.",
        code="no_namespace",
        phase="create",
        retryable=False,
    )


def _over_quota(refused: ApiRefused) -> bool:
    return refused.status == 403 and "exceeded quota" in refused.message


def _create_refused(refused: ApiRefused, namespace: str) -> SandboxError:
    """A refusal to make something, named for whoever can do something about it."""
    text = refused.message
    if _over_quota(refused):
        return SandboxError(
            text,
            fix="Run fewer sandboxes at once, or raise the namespace's quota.",
            code="quota",
            phase="create",
            evidence=refused.evidence,
        )
    for words, code, fix in _REFUSALS:
        if refused.status in (400, 403, 422) and words in text:
            return SandboxError(
                text,
                fix=fix,
                code=code,
                phase="create",
                retryable=False,
                evidence=refused.evidence,
            )
    return _namespaced(refused, namespace)


_ALLOWING = "Use a namespace that allows what a sandbox needs: deploy/kubernetes/namespace.yaml."
_REFUSALS = (
    (
        "PriorityClass",
        "forbidden",
        "Apply deploy/kubernetes/priorities.yaml, or unset AGENTRL_KUBERNETES_PRIORITY.",
    ),
    ("violates PodSecurity", "forbidden", _ALLOWING),
    ("unable to validate", "forbidden", _ALLOWING),
    (
        "is being terminated",
        "namespace_ending",
        "Wait until it is gone and create it again, or set AGENTRL_KUBERNETES_NAMESPACE to another.",
    ),
    (
        "denied the request",
        "admission_refused",
        "A webhook of the cluster refuses sandboxes: exempt the namespace, or change its rule.",
    ),
    (
        "usage per ",
        "limit_range",
        "The namespace's LimitRange allows less: lower the task's limits, or raise it.",
    ),
    ("RuntimeClass", "forbidden", "Create it, or unset AGENTRL_KUBERNETES_RUNTIME_CLASS."),
)
"""What a refusal says, its code, and what to do."""


def _altered(name: str, why: str) -> SandboxError:
    return SandboxError(
        f"The cluster made another pod than was asked for sandbox {name}: {why}.",
        fix="Exempt the namespace from the webhook or the LimitRange that changes its pods.",
        code="pod_altered",
        phase="create",
        retryable=False,
        evidence={"altered": why},
    )


def _no_node(name: str, why: str) -> SandboxError:
    return SandboxError(
        f"No node of the cluster takes sandbox {name}: {why}",
        fix="Run fewer sandboxes at once, lower the task's memory, or add nodes.",
        code="unschedulable",
        phase="schedule",
        evidence={"why": why},
    )


def _check_spec(spec: SandboxSpec, mounts: tuple[Mount, ...]) -> None:
    if spec.network != "none":
        raise SandboxError(
            f"The kubernetes backend has no network '{spec.network}'; a sandbox here reaches only itself.",
            fix="Set the task's network to none.",
            code="network_unsupported",
            phase="create",
            retryable=False,
        )
    for target in (spec.workdir, *(mount.target for mount in mounts)):
        parts = target.split("/")
        if not target.startswith("/") or ".." in parts or ":" in target or parts[1] in _TAKEN:
            raise SandboxError(
                f"'{target}' can not be a folder of a task.",
                fix="Use an absolute path such as /app, outside of the system's folders.",
                code="bad_path",
                phase="create",
                retryable=False,
            )
