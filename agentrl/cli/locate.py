"""What a person names to what is stored: stores, runs and trajectories by path, name or the start of an id.

Without `--store` the stores of all runs below `runs/` are searched, the newest first, or the one that
`AGENTRL_STORE` names. What is not found is the user's mistake (`ConfigError`), with the nearest name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.config import environment
from agentrl.errors import ConfigError, StoreError, nearest
from agentrl.store import Store
from agentrl.store.rows import RunRow

RUNS = Path("runs")
NO_STORE = "Start a run (agentrl quickstart), or give --store, or set AGENTRL_STORE."


def candidates(store: str | None) -> list[str]:
    """Store URLs or paths to look in, the most likely first. Raises `ConfigError` when there are none."""
    named = store or environment("STORE")
    if named:
        if "://" not in named and Path(named).is_dir():
            named = str(Path(named) / "store.db")
        if "://" not in named and not Path(named).exists():
            raise ConfigError(
                f"There is no store at {named}.", fix="Give the store.db of a run, or its folder."
            )
        return [named if "://" in named else str(Path(named).absolute())]
    found = sorted(RUNS.glob("*/store.db"), key=_touched, reverse=True)
    if not found:
        raise ConfigError("There is no store below runs/ yet.", fix=NO_STORE)
    return [str(path.absolute()) for path in found]


def _touched(path: Path) -> float:
    """When something was last written: SQLite writes beside the file first."""
    beside = path.with_name(path.name + "-wal")
    return max(p.stat().st_mtime for p in (path, beside) if p.exists())


@contextmanager
def opened(url: str) -> Iterator[Store]:
    """A store that exists. Raises `ConfigError` when it can not be opened."""
    try:
        store = Store.open(url, create=False)
    except StoreError as error:
        raise ConfigError(f"{url}: {error.message}", fix=error.fix) from error
    with store:
        yield store


@contextmanager
def run_in(run: str | None, store: str | None) -> Iterator[tuple[Store, RunRow]]:
    """The store and the run that `run` names: an id, its beginning, a name, or a folder. None: the newest.

    Raises:
        ConfigError: no such run, or several begin so.
    """
    if run is not None and store is None and (Path(run) / "store.db").exists():
        run, store = None, run
    known: list[str] = []
    for url in candidates(store):
        with opened(url) as here:
            rows = here.runs()
            found = rows if run is None else [r for r in rows if r.id.startswith(run)]
            found = found or [r for r in rows if r.name == run]
            if run is not None and len(found) > 1 and len({r.name for r in found}) > 1:
                raise ConfigError(
                    f"'{run}' begins {', '.join(r.id for r in found[:5])}.", fix="Give more characters."
                )
            if found:
                yield here, found[0]
                return
            known += [word for r in rows for word in (r.id, r.name)]
    raise ConfigError(
        "There is no run." if run is None else f"There is no run '{run}'.", fix=nearest(run or "", known)
    )


@contextmanager
def trajectory_in(trajectory: str, store: str | None) -> Iterator[tuple[Store, str]]:
    """The store and the whole id of a trajectory, given by the beginning of its id, with or without the id of
    its run before the first dash.

    Raises:
        ConfigError: no such trajectory, or several begin so.
    """
    problem: StoreError | None = None
    for url in candidates(store):
        with opened(url) as here:
            for prefix in (trajectory, *(f"{r.id}-{trajectory}" for r in here.runs(limit=1))):
                try:
                    found = here.resolve(prefix)
                except StoreError as error:
                    problem = problem or error
                    continue
                yield here, found
                return
    assert problem is not None, "there is at least one candidate"
    close = problem.fix is not None and not problem.fix.startswith("Known")
    raise ConfigError(problem.message, fix=problem.fix if close else "List them: agentrl trajectories list.")
