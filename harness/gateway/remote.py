"""Sessions of a gateway where the harness expects its own: `run_one(open_session=place.open, backend=place)`.

A `RemoteSession` keeps its lease alive while the policy thinks, sends each action under a key of its own (a
lost connection never runs it twice), checks the gateway's signature of the verdict and signs it again with
the run's key, so that a run is verified with one key wherever its sandboxes were.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from agentrl.errors import AgentRLError, ConfigError, SandboxError, nearest
from agentrl.types import Action, Fault, Observation, Task, Termination, Verdict
from envs import grading, registry
from envs.evidence import Admission
from envs.preparation import ImageStatus, images_of
from envs.sandbox.contract import Backend, FileChange, Isolation, Mount, Sandbox
from harness.attempt import SessionLike
from harness.gateway import client as gateway
from harness.gateway import wire

LEASE_S = 120.0
QUEUE_TIMEOUT_S = 540.0
"""Less than the harness waits for a session, so that the gateway's own reason is what is recorded."""
READY_DEADLINE_S = 3600.0
CALL_GRACE_S = 900.0
"""What a call may take beyond the command's own limit: queues, and the gateway's restarts."""
FINALIZE_GRACE_S = 600.0
ADMIT_DEADLINE_S = 3600.0
UNDO_DEADLINE_S = 10.0
"""For a session that nobody wants any more, and that may or may not have been opened."""

log = logging.getLogger(__name__)


class RemoteSession:
    """One session of a gateway. See `harness.attempt.SessionLike`."""

    def __init__(
        self, client: gateway.AsyncClient, task: Task, view: wire.SessionView, *, signing_key: bytes
    ) -> None:
        self.id = view.id
        self.tools: list[dict[str, Any]] = view.tools
        self.submitted = view.submitted
        self.time_multiplier = view.time_multiplier
        self._client = client
        self._task = task
        self._signing_key = signing_key
        self._names = {tool["function"]["name"] for tool in view.tools}
        self._calls = 0
        self._ended = False
        self._lease = asyncio.create_task(self._keep(view.lease))

    async def _keep(self, held: wire.LeaseView) -> None:
        """Renew the lease; what fails here is told by the next call."""
        while True:
            await asyncio.sleep(held.ttl_s / 3)
            try:
                await self._client.send(gateway.lease(self.id, epoch=held.epoch, ttl_s=held.ttl_s))
            except AgentRLError as error:
                log.warning("the lease of session %s was not renewed: %s", self.id, error)
                if isinstance(error, ConfigError) or not getattr(error, "retryable", False):
                    return

    async def call(self, action: Action) -> Observation:
        """Perform one action. Raises `SandboxError` for whatever is not the policy's."""
        self._calls += 1
        if action.error is not None:
            return Observation(action_id=action.id, text=action.error, is_error=True)
        if action.tool not in self._names:  # no name that a policy made up becomes a URL
            text = (
                "The work has been submitted; nothing can be done any more."
                if self.submitted
                else f"Unknown tool '{action.tool}'. {nearest(action.tool, self._names)}"
            )
            return Observation(action_id=action.id, text=text, is_error=True)
        seen, self.submitted = await self._client.send(
            gateway.tool(
                self.id,
                action.tool,
                call_id=str(self._calls),
                action_id=action.id,
                arguments=action.arguments,
                deadline_s=self.time_multiplier * self._task.limits.exec_timeout_s + CALL_GRACE_S,
            )
        )
        return seen

    async def finalize(self, *, termination: Termination, fault: Fault | None) -> Verdict:
        """The gateway's verdict, checked, and signed with the run's key."""
        verdict = await self._client.send(
            gateway.finalize(
                self.id,
                termination=termination,
                fault=fault,
                deadline_s=grading.longest_s(self._task, time_multiplier=self.time_multiplier)
                + FINALIZE_GRACE_S,
            )
        )
        self._ended = True
        if not grading.verify_signature(verdict, wire.signing_key(self._client.token)):
            raise SandboxError(
                f"Session {self.id}: the verdict is not signed with this tenant's key.",
                fix="Was the token replaced meanwhile, or the answer changed on its way?",
                owner="gateway",
                code="bad_signature",
                phase="finalize",
                retryable=False,
            )
        return grading.sign(verdict, self._signing_key)

    async def close(self) -> None:
        """Give it back. Never raises: what is not deleted ends with its lease."""
        self._lease.cancel()
        await asyncio.gather(self._lease, return_exceptions=True)
        if not self._ended:
            self._ended = True
            try:
                await self._client.send(gateway.delete(self.id))
            except AgentRLError as error:
                log.warning("session %s was not deleted and ends with its lease: %s", self.id, error)


class GatewayPlace:
    """A gateway as the place of a run's sandboxes: makes sessions, admits tasks, has a name and isolation.

    It stands where a `Backend` does, but makes no sandboxes here. Use it in one event loop.
    """

    def __init__(
        self, url: str, *, name: str, isolation: Isolation, client: gateway.AsyncClient | None = None
    ) -> None:
        self.url = url
        self._name = name
        self._isolation = isolation
        self._client = client or gateway.AsyncClient(url)
        self._sizes: dict[str, int] = {}
        """Of groups no member of which has been admitted yet."""

    @classmethod
    def connect(cls, url: str) -> GatewayPlace:
        """Ask the gateway what it is. Raises `ConfigError` or `SandboxError`."""
        with gateway.Client(url) as asking:
            found = asking.send(gateway.environments())
        if not found:
            raise ConfigError(f"The gateway {url} has no tasks.", fix="Serve it with --tasks DIR.")
        return cls(url, name=found[0].backend, isolation=_isolation(found[0].isolation))

    @property
    def name(self) -> str:
        return self._name

    @property
    def isolation(self) -> Isolation:
        return self._isolation

    def expect(self, group_id: str, size: int) -> None:
        """Say how many members of a group will ask at once, before the first does: the gateway admits them
        together or not at all. Do not promise more than will ask while the others wait."""
        self._sizes[_key(group_id)] = size

    async def open(
        self,
        task: Task,
        backend: Backend,
        *,
        session_id: str,
        signing_key: bytes,
        admission: Admission | None,
    ) -> SessionLike:
        """A ready session. The gateway has admissions of its own, so `admission` is not sent. A task of an
        environment without a sandbox stays in this process.

        Raises:
            ConfigError: the gateway does not have this task at this revision, or refuses the token.
            SandboxError: no session: the queue, the sandbox or the gateway; with its owner.
        """
        if registry.of_task(task) is not None:
            return await registry.open_session(
                task, self, session_id=session_id, signing_key=signing_key, admission=admission
            )
        group = _key(session_id.rsplit(".", 2)[0])
        asked = gateway.open_session(
            client_key=f"{_key(session_id)}:{uuid.uuid4().hex}",
            task_id=task.id,
            revision=task.revision,
            limits=task.limits,
            group_id=group,
            group_size=self._sizes.get(group, 1),
            queue_timeout_s=QUEUE_TIMEOUT_S,
            lease_ttl_s=LEASE_S,
        )
        try:
            view = await self._client.send(asked)
        except ConfigError:
            raise
        except BaseException:  # it may have been opened all the same: only its key is known
            await asyncio.shield(asyncio.ensure_future(self._undo(asked)))
            raise
        try:
            until = time.monotonic() + READY_DEADLINE_S
            while view.waiting and time.monotonic() < until:
                view = await self._client.send(gateway.session(view.id, wait_s=gateway.HOLD_S))
            if view.state not in ("ready", "running"):
                raise _unready(view)
            self._sizes.pop(group, None)  # who comes again after a fault goes alone
        except BaseException:
            with contextlib.suppress(AgentRLError):
                await asyncio.shield(asyncio.ensure_future(self._client.send(gateway.delete(view.id))))
            raise
        return RemoteSession(self._client, task, view, signing_key=signing_key)

    async def _undo(self, asked: gateway.Call[wire.SessionView]) -> None:
        """End a session that was asked for. Never raises: what is not deleted ends with its lease."""
        with contextlib.suppress(AgentRLError, TimeoutError):
            async with asyncio.timeout(UNDO_DEADLINE_S):
                view = await self._client.send(replace(asked, deadline_s=UNDO_DEADLINE_S / 2))
                await self._client.send(gateway.delete(view.id))

    async def admit(self, task: Task, *, light: bool = False) -> Admission:
        """Have the task validated where it will run; how thoroughly, a gateway decides itself."""
        if registry.of_task(task) is not None:
            return await registry.admit(task, self, light=light)
        return await self._client.send(gateway.admit(task.id, task.revision, deadline_s=ADMIT_DEADLINE_S))

    async def prepare_images(
        self, tasks: Sequence[Task], *, heard: Callable[[ImageStatus], None] | None = None
    ) -> tuple[ImageStatus, ...]:
        """Have the images of these tasks made ready where they will run: a status for each image, as they
        came. See `envs.preparation.prepare_images`."""
        wanted = [(task.id, task.revision) for sharing in images_of(tasks) for task in sharing]
        if not wanted:
            return ()
        seen: list[ImageStatus] = []
        async for view in gateway.preparing(self._client, wanted):
            for status in view.images[len(seen) :]:
                seen.append(status)
                if heard is not None:
                    heard(status)
        return tuple(seen)

    async def prepare(self, environment_dir: str) -> str:
        raise _elsewhere(self.url)

    async def create(
        self,
        spec: Any,
        *,
        image: str,
        session: str,
        mounts: tuple[Mount, ...] = (),
        apply: tuple[FileChange, ...] = (),
        deadline_s: float = 120.0,
    ) -> Sandbox:
        raise _elsewhere(self.url)

    async def close(self) -> None:
        await self._client.close()


def _key(name: str) -> str:
    """A name of the run's as a key of the wire."""
    return re.sub(r"[^A-Za-z0-9._:/@+-]", "_", name)[:160] or "_"


def _unready(view: wire.SessionView) -> SandboxError:
    fault = view.fault
    if fault is None:
        return SandboxError(
            f"Session {view.id} is {view.state}, not ready.", owner="gateway", code="not_ready", phase="open"
        )
    return SandboxError(
        fault.message,
        owner=fault.owner,
        code=fault.code,
        phase=fault.phase,
        retryable=fault.retryable,
        evidence=dict(fault.evidence),
    )


def _elsewhere(url: str) -> ConfigError:
    return ConfigError(f"Sandboxes are made by the gateway {url}, not here.", fix="Use its sessions.")


def _isolation(word: str) -> Isolation:
    match word:
        case "namespaces" | "docker" | "kubernetes" | "none":
            return word
        case _:
            raise ConfigError(f"The gateway names an unknown isolation '{word}'.", fix="Upgrade agentrl.")
