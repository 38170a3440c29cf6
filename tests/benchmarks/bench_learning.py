"""The recipes side by side on the quickstart suite: one cold start per seed, then every recipe from it.

    python tests/benchmarks/bench_learning.py [--folder DIR] [--seeds 1,2,3] [--recipes grpo,ppo,…]

A run that is finished in DIR is not made again, so a stopped comparison goes on where it was. All recipes
have the run file's learning rate and batch, and a KL term to the cold start; the reduction is each recipe's
own. The quickstart takes 14 updates and most recipes then stand near the ceiling: 8 leave a difference to
see. Writes `learning.md` and `learning.svg` beside this file; `CPU s` is of the training process (sandboxes
not counted), since wall time depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl import config
from agentrl.algo import recipes
from agentrl.cli.training import QUICKSTART, for_the_suite
from agentrl.learner import publish
from agentrl.store import Store
from agentrl.training import charts, loop
from agentrl.training.events import Silent

HERE = Path(__file__).parent
RECIPES = ("grpo", "dr-grpo", "dapo", "gspo", "cispo", "sapo", "ppo", "sao", "vapo", "rloo")
UPDATES, HELDOUT = 8, 64
KL = "train.overrides={penalty={kl_k3=false, kl_k2={coefficient=0.05}}}"
OWN = {
    "dr-grpo": ["train.overrides.reduction.max_length=1728"],
    "rloo": ["train.mini_batches=1", "train.epochs=1"],
}
"""What a recipe has no default for (18 turns of 96 tokens), one step a batch where there is no ratio."""
COLOURS = (
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#d62728",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#17becf",
)

STYLE = (
    "svg{background:#fff}text{font:12px sans-serif;fill:#444}.grid{stroke:#ddd}"
    ".curve{fill:none;stroke-width:2}.name{paint-order:stroke;stroke:#fff;stroke-width:5px}"
)

REPORT = """\
Made by `python tests/benchmarks/bench_learning.py --seeds {seeds}`: {updates} updates of 64 attempts from one
cold start per seed, then {heldout} tasks never trained on (one run is uncertain by 0.06 at 0.4 and
by 0.03 at 0.95). One learning rate and batch for all: recipes at one setting, not each at its best.

{table}
![Mean training reward per update](learning.svg)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run: success, what it cost, the reward of every update's batch."""

    recipe: str
    seed: int
    n: int
    before: float
    after: float
    wall_s: float
    cpu_s: float
    tokens: int
    faults: int
    curve: tuple[float, ...]


def cold_start(folder: Path, seed: int) -> Path:
    """The published version 0 of a seed; made once."""
    home = folder / f"cold-s{seed}"
    found = publish.versions(home / "versions") if (home / "done").exists() else []
    if not found:
        settings = config.load(
            QUICKSTART, [f'run.dir="{home}"', f"run.seed={seed}", "train.updates=0", "eval.tasks=0"]
        )
        loop.run(settings, listener=Silent(), resume=(home / "run.json").exists())
        (home / "done").touch()
        found = publish.versions(home / "versions")
    return Path(found[0].location)


def run(folder: Path, recipe: str, seed: int, start: Path) -> Result:
    home = folder / f"{recipe}-s{seed}"
    kept = home / "result.json"
    if kept.exists():
        return Result(**json.loads(kept.read_text()))
    typed = [
        f'run.dir="{home}"',
        f'run.store="sqlite:///{folder.resolve()}/store.db"',  # one, so that a task is admitted once
        f"run.seed={seed}",
        f'policy.source="{start}"',
        "coldstart.demonstrations=0",
        "tasks.demonstrated=0",
        f'train.recipe="{recipe}"',
        f"train.updates={UPDATES}",
        f"eval.tasks={HELDOUT}",
        KL,
        *for_the_suite(recipe),
        *OWN.get(recipe, []),
    ]
    size = recipes.get(recipe).group_size
    if size is not None:
        typed += [f"rollout.group_size={size}", f"rollout.groups={64 // size}"]
    cpu = time.process_time()
    summary = loop.run(config.load(QUICKSTART, typed), listener=Silent(), resume=(home / "run.json").exists())
    assert summary.heldout_before is not None
    assert summary.heldout_after is not None
    with Store.open(summary.store) as store:
        curve = [row.value for row in store.metrics(summary.run_id, ["rollout/success"])]
        tokens = sum(row.tokens for row in store.trajectories(summary.run_id, phase="train", limit=None))
    result = Result(
        recipe=recipe,
        seed=seed,
        n=summary.heldout_n,
        before=summary.heldout_before,
        after=summary.heldout_after,
        wall_s=summary.wall_s,
        cpu_s=round(time.process_time() - cpu, 1),
        tokens=tokens,
        faults=summary.faults,
        curve=tuple(curve),
    )
    kept.write_text(json.dumps(asdict(result)))
    return result


def table(results: list[Result]) -> str:
    """Markdown, best mean first."""
    by: dict[str, list[Result]] = {}
    for each in results:
        by.setdefault(each.recipe, []).append(each)
    rows = []
    for recipe, runs in sorted(by.items(), key=lambda item: -statistics.fmean(r.after for r in item[1])):
        after = [r.after for r in runs]
        rows.append(
            f"| `{recipe}` | {len(runs)} | {statistics.fmean(r.before for r in runs):.2f} "
            f"| {statistics.fmean(after):.2f} ({min(after):.2f} to {max(after):.2f}) "
            f"| {statistics.fmean(r.cpu_s for r in runs):.0f} "
            f"| {statistics.fmean(r.tokens for r in runs) / 1000:.0f}k | {sum(r.faults for r in runs)} |"
        )
    head = (
        "| recipe | seeds | held-out before | after: mean (range) | CPU s | tokens sampled | faults |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
    )
    return head + "\n".join(rows) + "\n"


def plot(results: list[Result]) -> str:
    """Mean training reward over the seeds, per update, as an SVG file of its own."""
    series: list[charts.Line] = []
    legend: list[str] = []
    for colour, recipe in zip(COLOURS, dict.fromkeys(r.recipe for r in results), strict=False):
        curves = [r.curve for r in results if r.recipe == recipe]
        length = min(map(len, curves))
        points = [(float(i + 1), statistics.fmean(c[i] for c in curves)) for i in range(length)]
        series.append(charts.Line(name=recipe, colour=colour, points=points))
        legend.append(
            f'<text x="640" y="{16 * len(legend) + 150}" class="name" style="fill:{colour}">{recipe}</text>'
        )
    drawing = charts.lines(
        series, height=360, x_label="update", percent=True, bounds=(0.0, 1.0), title="Mean reward"
    )
    head, _, body = str(drawing).removesuffix("</svg>").partition(">")
    names = "".join(legend)  # last, so that no line runs through them
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{body}{names}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    typed = parser.parse_args()
    results = []
    for seed in map(int, typed.seeds.split(",")):
        start = cold_start(typed.folder, seed)
        for recipe in typed.recipes.split(","):
            results.append(run(typed.folder, recipe, seed, start))
            last = results[-1]
            print(
                f"{recipe} seed {seed}: {last.before:.2f} to {last.after:.2f}, {last.cpu_s} CPU s", flush=True
            )
    told = REPORT.format(seeds=typed.seeds, updates=UPDATES, heldout=HELDOUT, table=table(results))
    (HERE / "learning.md").write_text(told)
    (HERE / "learning.svg").write_text(plot(results))
    print(table(results))


if __name__ == "__main__":
    main()
