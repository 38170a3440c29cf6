"""Named shells over HTTP, on real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from gateway_given import on_processes, task_at

from agentrl.errors import SandboxError
from agentrl.store import Store
from agentrl.types import ExecStatus
from envs.sandbox.agent import SHELLS
from harness.gateway import client as calls
from harness.gateway import wire


def test_a_shell_is_kept_between_requests_and_a_lost_one_is_started_again(
    store: Store, tmp_path: Path
) -> None:
    task = task_at(tmp_path / "task", shell="persistent")

    async def run() -> None:
        async with on_processes(store, task, tmp_path) as (here, session):

            async def ask(exec_id: str, command: str, timeout_s: float = 60.0) -> wire.ExecView:
                body = wire.ExecBody(exec_id=exec_id, command=command, shell="main", timeout_s=timeout_s)
                return await here.ada.send(calls.run(session, body))

            assert (await ask("a", "mkdir sub; cd sub; V=kept")).exit_code == 0
            late = await ask("b", "V=lost; cat; sleep 300", timeout_s=1.0)
            assert (late.status, late.shell_restarted) == (ExecStatus.TIMEOUT, False)
            look = 'echo "$V"; basename "$PWD"'
            first, again = await ask("c", look), await ask("c", look)
            assert (first.stdout.head, first.shell_restarted) == ("kept\nsub\n", True)
            assert again == first
            after, beside = await asyncio.gather(ask("d", "sleep 0.3; W=1"), ask("e", look))
            assert (after.exit_code, beside.stdout.head, beside.shell_restarted) == (
                0,
                first.stdout.head,
                False,
            )
            seen, _ = await here.ada.send(
                calls.tool(
                    session,
                    "bash",
                    call_id="t",
                    action_id="t",
                    arguments={"command": 'echo "${V-none}"'},
                    deadline_s=60.0,
                )
            )
            assert seen.text == "none\n", "a caller's shell is not the tool's"
            bodies = [
                wire.ExecBody(exec_id=f"n{number}", command="true", shell=f"n{number}")
                for number in range(SHELLS - 1)
            ]
            for body in bodies[:-1]:  # one is the caller's, one the tool's
                await here.ada.send(calls.run(session, body))
            with pytest.raises(SandboxError, match="shells are in use"):
                await here.ada.send(calls.run(session, bodies[-1]))
            assert (await ask("f", look)).stdout.head == first.stdout.head

    asyncio.run(run())


@pytest.mark.parametrize("asked", [{"argv": ["ls"], "shell": "main"}, {"command": "ls", "shell": "a b"}])
def test_a_shell_that_can_not_be_is_refused_before_anything_runs(asked: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="shell"):
        wire.ExecBody.model_validate({"exec_id": "e", **asked})
