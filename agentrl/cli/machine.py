"""`doctor`, `bench`: what this machine can do, and how fast."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer
from rich.markup import escape

from agentrl.cli import output, progress
from agentrl.cli.boundary import FAILED
from agentrl.errors import BoundaryError
from agentrl.training.events import Listener
from agentrl.types import SandboxSpec
from envs.sandbox.backends import checked
from envs.sandbox.contract import Backend, ExecRequest
from envs.sandbox.probe import Finding, probe_machine

LEFT_DEADLINE_S = 15.0
OPTIONAL = frozenset({"docker engine", "kubernetes", "GPU"})
"""A run on this machine does not need them."""
PACKAGES = ("torch", "transformers", "tokenizers", "sqlalchemy", "pydantic")
MARKS = {"ok": ("✓", "green"), "degraded": ("!", "yellow"), "missing": ("✗", "red")}


def doctor(*, as_json: bool) -> None:
    """Findings with a fix each; exit code 1 if something needed is missing."""
    findings = [*probe_machine(), *_packages(), _gpu()]
    lacking = [f for f in findings if f.status == "missing" and f.name not in OPTIONAL]
    if as_json:
        rows = [{**output.jsonable(f), "needed": f.name not in OPTIONAL} for f in findings]
        output.emit({"ok": not lacking, "findings": rows})
    else:
        width = max(len(f.name) for f in findings)
        for finding in findings:
            mark, colour = MARKS[finding.status]
            if finding.status == "missing" and finding.name in OPTIONAL:
                mark, colour = "–", "dim"
            output.say(f"[{colour}]{mark}[/] {escape(finding.name):{width}}  {escape(finding.detail)}")
            if finding.fix:
                output.say(f"  {'':{width}}  [dim]{escape(finding.fix)}[/]")
        if lacking:
            output.say(f"[red]{len(lacking)} missing:[/] {', '.join(escape(f.name) for f in lacking)}")
        else:
            output.say("[green]Ready.[/] Try: agentrl quickstart")
    if lacking:
        raise typer.Exit(FAILED)


def _packages() -> list[Finding]:
    found = [Finding(name="python", status="ok", detail=platform.python_version())]
    for name in PACKAGES:
        try:
            found.append(Finding(name=name, status="ok", detail=version(name)))
        except PackageNotFoundError:
            fix = "Install agentrl again: `pip install -e .`."
            found.append(Finding(name=name, status="missing", detail="not installed", fix=fix))
    return found


def _gpu() -> Finding:
    """By the driver's own files; nothing is loaded."""
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    if not cards:
        return Finding(name="GPU", status="missing", detail="no NVIDIA driver; models run on the CPU")
    models = [
        line.partition(":")[2].strip()
        for c in cards
        for line in c.read_text().splitlines()
        if "Model" in line
    ]
    return Finding(name="GPU", status="ok", detail=", ".join(models))


def bench_sandboxes(backend: str, count: int, commands: int, at_once: int, *, as_json: bool) -> None:
    """Times of creating, using and closing sandboxes, in milliseconds."""
    with progress.shown(as_json=as_json) as listener, _folder() as folder:
        listener.begin("sandboxes", total=count, unit="sandboxes")
        place = checked(backend, folder)
        before = _held(folder)
        started = time.perf_counter()
        times, ends = asyncio.run(_bench(place, folder, count, commands, at_once, listener))
        wall_s = time.perf_counter() - started
        left = _left(folder, before)
        listener.end()
    facts = {
        what: {"p50": _quantile(ms, 0.5), "p95": _quantile(ms, 0.95), "n": len(ms)}
        for what, ms in times.items()
    }
    failed = {end: n for end, n in ends.items() if end != "ok"}
    if as_json:
        given = {"backend": backend, "count": count, "commands": commands, "at_once": at_once}
        output.emit({**given, "wall_s": wall_s, "milliseconds": facts, "ends": ends, "left": left})
    else:
        output.table(
            ("what", "p50 ms", "p95 ms", "times"),
            [
                (what, output.number(f["p50"], 1), output.number(f["p95"], 1), f["n"])
                for what, f in facts.items()
            ],
            numbers=("p50 ms", "p95 ms", "times"),
        )
        took = output.duration(wall_s)
        output.say(f"{count} {backend} sandboxes, {at_once} at once, {commands} commands each: {took}")
        remains = ", ".join(f"{number} {what}" for what, number in left.items() if number)
        where = f" (below {folder}; removed once their engine lets go of them)"
        output.say(
            f"[red]left behind:[/] {remains}{where}" if remains else f"Left behind: no {', '.join(left)}"
        )
        if failed:
            output.say(f"[red]ended otherwise:[/] {', '.join(f'{end} {n}' for end, n in failed.items())}")
    if failed or any(left.values()):
        raise typer.Exit(FAILED)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for the state of sandboxes. It stays while something is mounted below it, for those who
    remove that late."""
    folder = Path(tempfile.mkdtemp(prefix="agentrl-bench-"))
    try:
        yield folder
    finally:
        if str(folder) not in Path("/proc/self/mountinfo").read_text():
            shutil.rmtree(folder)


def _held(folder: Path) -> dict[str, int]:
    """What sandboxes whose state is below `folder` hold on this machine now. A container holds mounts and a
    folder here for as long as its engine knows it."""
    parents: dict[str, str] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[name] = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
    below = {str(os.getpid())}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {
        "processes": len(below) - 1,
        "mounts": sum(str(folder) in line for line in mounts),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "folders": sum(1 for run in folder.rglob("run") if run.is_dir() for _ in run.iterdir()),
    }


def _left(folder: Path, before: dict[str, int]) -> dict[str, int]:
    """What is held more than before, after a moment for those who remove it in the background."""
    until = time.monotonic() + LEFT_DEADLINE_S
    while True:
        left = {what: max(0, number - before[what]) for what, number in _held(folder).items()}
        if not any(left.values()) or time.monotonic() > until:
            return left
        time.sleep(0.1)


async def _bench(
    backend: Backend, folder: Path, count: int, commands: int, at_once: int, listener: Listener
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Milliseconds of each operation, and how the sandboxes ended."""
    times: dict[str, list[float]] = {"ready": [], "exec": [], "close": []}
    ends: dict[str, int] = {}
    environment = folder / "environment"
    environment.mkdir()
    (environment / "app.py").write_text("print('hello')\n")
    image = await backend.prepare(str(environment))
    spec = SandboxSpec(image=image, memory_mib=128, disk_mib=16, pids=32)
    limit = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        end = "ok"
        async with limit:
            try:
                begun = time.perf_counter()
                box = await backend.create(spec, image=image, session=f"bench-{number}")
                times["ready"].append(_since(begun))
                try:
                    for command in range(commands):
                        begun = time.perf_counter()
                        await box.exec(ExecRequest(exec_id=str(command), command="true"))
                        times["exec"].append(_since(begun))
                finally:
                    begun = time.perf_counter()
                    await box.close()
                    times["close"].append(_since(begun))
            except BoundaryError as error:
                end = error.code
        ends[end] = ends.get(end, 0) + 1
        listener.advance(1)

    try:
        await asyncio.gather(*(one(number) for number in range(count)))
    finally:
        await backend.close()
    return times, ends


def _since(begun: float) -> float:
    return (time.perf_counter() - begun) * 1000


def _quantile(values: list[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed; None without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None
