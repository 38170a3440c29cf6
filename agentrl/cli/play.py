"""`tasks play`: a person attempts a task, and the attempt is kept as a demonstration."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path

from rich.markup import escape

from agentrl.cli import output
from agentrl.errors import ConfigError, TaskError
from agentrl.inference.scripted import ScriptedSampler
from agentrl.learner import small
from agentrl.store import Store
from agentrl.training.given import loaded_tokenizer
from agentrl.types import SamplingParams, Task, Trajectory
from envs.admission import admit
from envs.sandbox.backends import checked
from envs.tasks.package import load_task
from envs.tools import persistent, tool_schemas
from harness.agents.human import Human
from harness.chat import ChatFormat
from harness.rollout import RolloutSettings, run_one

PHASE = "demonstration"


def play(
    path: Path, *, tokenizer: str | None, tool_parser: str, backend: str, store: str | None, as_json: bool
) -> None:
    """One attempt by whoever sits here."""
    try:
        task = load_task(path)
    except TaskError as error:
        raise ConfigError(error.message, fix=error.fix) from error
    if not task.tools:
        raise ConfigError(f"{task.id} has no tools to play with.", fix="Give its task.toml some.")
    found = loaded_tokenizer(tokenizer) if tokenizer else _own_tokenizer(task)
    chat = ChatFormat(found, tool_parser=tool_parser)
    schemas = tool_schemas(task.tools, persistent_shell=persistent(task))
    tools = ", ".join(f"{t['function']['name']}" for t in schemas)
    console = output.err()
    console.print(f"[bold]{escape(task.id)}[/]  tools: {tools}; `say …` ends. Ctrl-D gives up.")

    def show(text: str) -> None:
        console.print(escape(text))

    human = Human(chat, schemas, read=input, show=show)
    run_id = f"play-{secrets.token_hex(4)}"
    trajectory = asyncio.run(_attempt(task, chat, human, backend, run_id))
    if store is not None:
        _keep(store, task, trajectory, found, run_id)
    verdict = trajectory.verdict
    if as_json:
        output.emit(
            {
                "trajectory": trajectory.id,
                "termination": trajectory.termination,
                "reward": verdict.reward,
                "fault": None if verdict.fault is None else verdict.fault.message,
                "turns": len(trajectory.turns),
                "store": store,
            }
        )
        return
    reward = "none" if verdict.reward is None else f"{verdict.reward:g}"
    output.say(f"{trajectory.termination} after {len(trajectory.turns)} turns, reward {reward}")
    if store is not None:
        output.say(f"kept: agentrl trajectories show {trajectory.id} --store {escape(store)}")


async def _attempt(task: Task, chat: ChatFormat, human: Human, backend: str, run_id: str) -> Trajectory:
    place = checked(backend)
    try:
        admission = await admit(task, place, light=True)
        return await run_one(
            task,
            sampler=ScriptedSampler(human, encode=chat.encode_reply, name="human"),
            chat=chat,
            backend=place,
            group_id=run_id,
            index=0,
            signing_key=secrets.token_bytes(32),
            admission=admission,
            settings=RolloutSettings(
                sampling=SamplingParams(max_tokens=task.limits.max_tokens),
                require_log_probs=False,
                sample_deadline_s=task.limits.wall_s,
            ),
        )
    finally:
        await place.close()


def _own_tokenizer(task: Task) -> object:
    """Where none is named: one made of the task's own texts, so that nothing need be downloaded."""
    folder = Path(task.path)
    texts = [file.read_text(errors="replace") for file in sorted(folder.rglob("*.py"))]
    return small.build_tokenizer([task.instruction, *texts], vocabulary=1000)


def _keep(url: str, task: Task, trajectory: Trajectory, tokenizer: object, run_id: str) -> None:
    target = url if "://" in url or not Path(url).is_dir() else str(Path(url) / "store.db")
    folder = Path("runs") / run_id
    tokenizer.save_pretrained(folder / "tokenizer")  # type: ignore[attr-defined]
    with Store.open(target) as store:
        config = {"run": {"name": "play", "dir": str(folder.absolute())}}
        run = store.begin_run("play", config=config, algo="play", seed=int(time.time()), run_id=run_id)
        store.add_task(task)
        store.add_trajectory(run.id, trajectory, phase=PHASE)
        store.finish_run(run.id)
