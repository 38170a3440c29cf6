"""`serve`: the environment gateway and the model proxy as processes, and who may use them."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from agentrl.cli import output
from agentrl.errors import ConfigError

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def gateway(
    backend: str,
    store: str,
    host: str,
    port: int,
    tasks: Path,
    *,
    name: str,
    state_dir: Path | None,
    slots: int,
    memory_mib: int | None,
    permits: int | None,
    verify: int | None,
    admission: str,
    snapshots: int,
    snapshot_mib: int,
    download_mib: int,
    warm: int,
    uploads: Path | None = None,
    as_json: bool,
) -> None:
    """Serve until a signal."""
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"The gateway needs {', '.join(missing)}.", fix="Install it: pip install 'agentrl[serve]'."
        )
    from services.gateway import process
    from services.gateway.core import Settings

    cores = os.cpu_count() or 1
    settings = Settings(
        name=name,
        slots=slots,
        memory_mib=float(memory_mib if memory_mib is not None else 0.8 * _machine_mib()),
        permits=permits or 2 * cores,
        verify=verify or max(1, cores),
        creates=2 * cores,
        admission=admission,
        snapshots=snapshots,
        snapshot_mib=float(snapshot_mib),
        download_mib=float(download_mib),
    )

    def announce(serving: process.Serving) -> None:
        if as_json:
            output.emit(output.jsonable(serving))
            sys.stdout.flush()
            return
        output.say(f"[bold green]Serving[/] {serving.url}  (epoch {serving.epoch})")
        output.say(
            f"{serving.tasks} tasks on {serving.backend} ({serving.isolation}), {serving.tenants} tenants"
        )
        output.fact("Docs", f"{serving.url}/docs", width=7)
        output.fact("Run", f"agentrl train run.toml --set sandbox.gateway={serving.url}", width=7)

    process.serve(
        backend_name=backend,
        state_dir=state_dir,
        store_url=store,
        host=host,
        port=port,
        tasks=tasks,
        settings=settings,
        announce=announce,
        warm=warm,
        uploads=uploads,
    )


def _machine_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def tenant(name: str, store: str, *, weight: float, max_sessions: int, max_queue: int, as_json: bool) -> None:
    """Print the token of a new tenant, once."""
    from services.gateway import process

    token = process.add_tenant(store, name, weight=weight, max_sessions=max_sessions, max_queue=max_queue)
    if as_json:
        output.emit({"tenant": name, "token": token})
        return
    output.fact("Token", token, width=7)
    output.say("It is shown only now. Use it as [bold]AGENTRL_GATEWAY_TOKEN[/].")


def proxy(
    model: str | None,
    servers: list[str],
    tokenizer: str | None,
    *,
    tool_parser: str,
    temperature: float,
    max_tokens: int,
    obey_client: bool,
    split_reasoning: bool,
    version: int,
    folder: Path,
    store: str | None,
    host: str,
    port: int,
    as_json: bool,
) -> None:
    """Serve the recording proxy until a signal."""
    missing = [package for package in ("starlette", "uvicorn") if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"The proxy needs {', '.join(missing)}.", fix="Install it: pip install 'agentrl[serve]'."
        )
    source = tokenizer or model
    if source is None or (model is None) == (not servers):
        raise ConfigError(
            "The proxy needs a policy.",
            fix="Give --model FOLDER_OR_HUB_ID, or --server URL with --tokenizer FOLDER_OR_HUB_ID.",
        )
    from agentrl.inference.local import LocalSampler
    from agentrl.inference.sampler import Sampler
    from agentrl.inference.vllm import VllmSampler
    from agentrl.learner import model as models
    from agentrl.training.given import loaded_tokenizer
    from agentrl.types import SamplingParams
    from harness.chat import ChatFormat
    from harness.proxy.model import Rules
    from services.proxy import process
    from services.proxy.sessions import Settings

    chat = ChatFormat(loaded_tokenizer(source), tool_parser=tool_parser)

    async def connect() -> tuple[Sampler, int]:
        if model is None:
            remote = await VllmSampler.connect(servers)
            return remote, remote.max_context
        local = LocalSampler(
            models.load(model), stop_token_ids=chat.stop_token_ids, name=model, version=version
        )
        return local, local.max_context

    def announce(serving: process.Serving) -> None:
        if as_json:
            output.emit(output.jsonable(serving))
            sys.stdout.flush()
            return
        output.say(f"[bold green]Serving[/] {serving.model} at {serving.url}, recorded in {serving.store}")
        output.say("A first session; any OpenAI or Anthropic client works with it:")
        output.fact("", f"export OPENAI_BASE_URL={serving.session['openai_base_url']}", width=2)
        output.fact("", f"export ANTHROPIC_BASE_URL={serving.session['anthropic_base_url']}", width=2)
        output.fact(
            "",
            f"export OPENAI_API_KEY={serving.session['key']} ANTHROPIC_API_KEY={serving.session['key']}",
            width=2,
        )
        output.say("More sessions (each is one trajectory, kept when it is closed):")
        output.fact(
            "", f"curl -X POST {serving.url}/sessions -H 'Authorization: Bearer {serving.admin_key}'", width=2
        )
        output.say(f"Then: agentrl trajectories fidelity {serving.run}")

    folder.mkdir(parents=True, exist_ok=True)
    process.serve(
        connect=connect,
        chat=chat,
        folder=folder,
        store_url=store or f"sqlite:///{(folder / 'store.db').absolute()}",
        name="proxy",
        host=host,
        port=port,
        settings=Settings(
            sampling=SamplingParams(temperature=temperature, max_tokens=max_tokens),
            rules=Rules(obey=obey_client, split_reasoning=split_reasoning, end_on_fault=False),
        ),
        announce=announce,
    )
