"""Agents by name: what a run file or a command line may call for.

A row of `AGENTS` says how somebody else's agent is started; another one is another row, or an `AgentCommand`
of one's own. Their packages are not ours to install: `folder` is where `pip install --target FOLDER` put
them, for the Python of the sandbox.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from agentrl.errors import ConfigError, nearest
from harness.agent import Agent, ToolAgent
from harness.agents import loop
from harness.agents.command import AgentCommand, CommandAgent
from harness.proxy.model import Rules

BUILT_IN = "tool-agent"


def _loop(folder: Path | None) -> AgentCommand:
    return AgentCommand(
        name="shell-loop/1",
        argv=("python3", "/tmp/agentrl-loop.py"),
        files={"/tmp/agentrl-loop.py": Path(loop.__file__).read_bytes()},
        folder=folder,
    )


def _mini(folder: Path | None) -> AgentCommand:
    """https://mini-swe-agent.com: its own command line, in its own default configuration. It leaves a reply
    that it can not read out of its history, so what follows such a reply is a branch (`history_edited`)."""
    return AgentCommand(
        name=f"mini-swe-agent/{_version('mini_swe_agent', folder)}",
        argv=(
            *("python3", "-m", "minisweagent.run.mini", "-t", "{instruction}", "-m", "openai/policy"),
            *("--yolo", "--exit-immediately", "--cost-limit", "0", "-o", "/tmp/mini.traj.json"),
        ),
        env={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # Else it asks the network for prices.
            "TERM": "dumb",
        },
        folder=folder,
    )


AGENTS: Mapping[str, Callable[[Path | None], AgentCommand]] = MappingProxyType(
    {"shell-loop": _loop, "mini-swe-agent": _mini}
)


def get(name: str, *, folder: Path | None = None, rules: Rules | None = None) -> Agent:
    """An agent by name. Raises `ConfigError` for one that is not known, naming the nearest."""
    if name == BUILT_IN:
        return ToolAgent()
    if name not in AGENTS:
        raise ConfigError(f"There is no agent '{name}'.", fix=nearest(name, [BUILT_IN, *AGENTS]))
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            f"There is no folder {folder} with the packages of {name}.",
            fix=f"Make it: pip install --target {folder} {name}",
        )
    return CommandAgent(AGENTS[name](folder), rules=rules)


def _version(package: str, folder: Path | None) -> str:
    """Of a package in a folder, or installed here; `unknown` when the task's image has it."""
    if folder is not None:
        found = sorted(folder.glob(f"{package}-*.dist-info"))
        return found[-1].name.removeprefix(f"{package}-").removesuffix(".dist-info") if found else "unknown"
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
