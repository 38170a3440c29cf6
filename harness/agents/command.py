"""Somebody else's agent as an `Agent`: a command in the session's sandbox, unmodified.

It is started with the address of its model and a key in its environment, works on the task's files with its
own tools, and ends by itself. Every reply that it gets is sampled and recorded through the proxy; its
commands run in the sandbox like any other, so the verdict rests on the same evidence.

How it ends: exit status 0 is `finished`; a budget that ran out is that budget's reason; a status other than 0
without such a cause is a fault of the environment (the agent broke), never a zero for the policy.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from agentrl.errors import ConfigError, SandboxError
from agentrl.types import ExecStatus, Termination
from envs.sandbox.contract import ExecRequest, ExecResult, Mount
from harness.agents import inside
from harness.agents.bridge import Bridge, Workspace
from harness.attempt import Attempt, OutOfBudget
from harness.proxy.door import Door
from harness.proxy.model import ProxiedModel, Rules

FOLDER = "/opt/agent"
"""Where an agent's own folder is found in the sandbox, first on its PYTHONPATH."""
GRACE_S = 10.0
"""For an agent to end by itself when its model answers no more."""
TOLD_CHARS = 600
"""Of an agent's last words that a fault repeats."""
_INSIDE = Path(inside.__file__).read_bytes()
KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AGENTRL_API_KEY")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """What to start. In `argv`, `{instruction}` stands for the task's instruction."""

    name: str
    """Recorded with every trajectory; says the version: `mini-swe-agent/2.4.6`."""
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Written into the sandbox before the start, by absolute path outside the workdir."""
    folder: Path | None = None
    """Packages that the agent is made of (`pip install --target`); None when the task's image has it. Below
    `/usr` they are used where they are (local sandboxes see this machine's `/usr`, an image has its own);
    from anywhere else a copy is given read-only at `/opt/agent`, compared with its source at every start."""

    @property
    def shared(self) -> bool:
        """Whether sandboxes see the folder without being given it."""
        return self.folder is not None and self.folder.is_relative_to("/usr")

    @property
    def python_path(self) -> str:
        """Where the packages are in the sandbox."""
        return str(self.folder) if self.shared else FOLDER

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """For `Session.open`."""
        given = self.folder is not None and not self.shared
        return (Mount(source=str(self.folder), target=FOLDER),) if given else ()


class CommandAgent:
    """An `Agent`. See the module."""

    def __init__(self, command: AgentCommand, *, rules: Rules | None = None) -> None:
        self._command = command
        self._rules = rules or Rules()

    @property
    def name(self) -> str:
        return self._command.name

    @property
    def mounts(self) -> tuple[Mount, ...]:
        return self._command.mounts

    async def run(self, attempt: Attempt) -> Termination:
        """Start the agent and serve it until it ends.

        Raises:
            ConfigError: the session gives no commands (a tool environment, a gateway's session).
            OutOfBudget: a budget ended it.
            BoundaryError: the sandbox or the policy server failed, or the agent broke.
        """
        workspace = _workspace(attempt.session)
        model = ProxiedModel(attempt, self._rules)
        key = secrets.token_urlsafe(24)
        door = Door(model, key=key)
        folder = f"/tmp/agentrl-{secrets.token_hex(8)}"
        try:
            for path, data in {f"{folder}.py": _INSIDE, **self._command.files}.items():
                await workspace.write_file(path, data, mode=0o755)
            result = await self._served(
                attempt, workspace, model, Bridge(workspace, folder, door), folder, key
            )
        finally:
            attempt.turns.extend(model.turns())
            attempt.notes.update({**model.facts(), "retries_joined": door.retries_joined})
        return _end(result, model, self._command.name)

    async def _served(
        self,
        attempt: Attempt,
        workspace: Workspace,
        model: ProxiedModel,
        bridge: Bridge,
        folder: str,
        key: str,
    ) -> ExecResult:
        """Run the agent beside its bridge; whatever ends first ends the other."""
        words = [word.replace("{instruction}", attempt.task.instruction) for word in self._command.argv]
        seconds = max(1.0, attempt.left_s)
        run = ExecRequest(
            exec_id=workspace.next_exec_id(),
            argv=("python3", f"{folder}.py", folder, f"{seconds:.1f}", "--", *words),
            env={
                **dict.fromkeys(KEYS, key),
                "PYTHONPATH": self._command.python_path,
                "AGENTRL_INSTRUCTION": attempt.task.instruction,
                **self._command.env,
            },
            timeout_s=seconds + GRACE_S,
        )
        agent = asyncio.create_task(workspace.exec(run))
        carrying = asyncio.create_task(bridge.run())
        over = asyncio.create_task(model.over.wait())
        try:
            await asyncio.wait({agent, carrying, over}, return_when=asyncio.FIRST_COMPLETED)
            if carrying.done():
                carrying.result()
            if not agent.done():
                await asyncio.wait({agent}, timeout=GRACE_S)
            if not agent.done():
                await workspace.write_file(f"{folder}/stop", b"", mode=0o644)
            result = await agent
            await bridge.finish(carrying)
            return result
        finally:
            for task in (carrying, over, agent):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(carrying, over, agent, return_exceptions=True)


def _workspace(session: Any) -> Workspace:
    if not all(hasattr(session, name) for name in ("exec", "read_file", "write_file", "next_exec_id")):
        raise ConfigError(
            "An agent that is a command needs a session with a sandbox of this process.",
            fix="Use tasks with a sandbox, and a backend in place of a gateway.",
        )
    return cast(Workspace, session)


def _end(result: ExecResult, model: ProxiedModel, name: str) -> Termination:
    """What an agent's end means."""
    if model.ended_by is not None:
        raise model.ended_by
    if result.status is ExecStatus.TIMEOUT or result.exit_code == 124:
        raise OutOfBudget(Termination.WALL_CLOCK)
    if result.status is ExecStatus.EXITED and result.exit_code == 0:
        return Termination.FINISHED
    if model.context_full:
        raise OutOfBudget(Termination.CONTEXT_FULL)
    last = (result.stderr.text().strip() or result.stdout.text().strip())[-TOLD_CHARS:]
    raise SandboxError(
        f"{name} ended with {result.status} {result.exit_code}: {last or 'no words'}.",
        fix="Run its command in the task's image by hand; give its packages with the agent's folder.",
        code="agent_broke",
        phase="run",
        evidence={"exit_code": result.exit_code, "status": str(result.status)},
    )
