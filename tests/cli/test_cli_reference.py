"""Reference tables say what the code says."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.algo.recipes import RECIPES
from agentrl.cli.reference import keys
from agentrl.config import load

ROOT = Path(__file__).parents[2]


def test_every_recipe_is_listed_and_shown(typed) -> None:
    shown = json.loads(typed("recipes", "--json").stdout)["recipes"]
    assert [row["name"] for row in shown] == list(RECIPES)
    one = json.loads(typed("recipes", "dapo", "--json").stdout)
    assert one["axes"]["surrogate"][0]["numbers"]["high"] == 0.28


def test_the_table_of_recipes_has_all_that_a_reader_chooses_by_here_and_in_the_readme(typed) -> None:
    head = typed("recipes").stdout.splitlines()[0]
    readme = (ROOT / "README.md").read_text()
    for column in ("arXiv", "equation", "choices", "needs", "columns", "differs from the paper in"):
        assert column in head
        assert f"| {column} |" in readme.partition("generated: recipes")[2].splitlines()[1]
    row = next(line for line in readme.splitlines() if line.startswith("| `spo` |"))
    assert "values_N (extra=)" in row, "what no run makes by itself is said"
    assert "surrogate: ppo_clip" in row


def test_numbers_that_must_be_set_are_said_to_be(typed) -> None:
    assert "max_length must be set" in typed("recipes", "dapo-soft-overlong").stdout


def test_keys_have_their_type_default_and_meaning() -> None:
    table = {key: rest for key, *rest in keys()}
    assert table["train.critic_learning_rate"][:2] == ["float or none", "none"]
    assert table["run.dir"][2].startswith("Folder of everything the run leaves")
    assert table["policy.small.layers"][1] == "2"
    assert table["tasks.admission"][0] == '"light" | "full" | "stored"'


def test_a_run_file_is_shown_resolved(typed) -> None:
    words = ("config", ROOT / "deploy/runs/quickstart.toml", "--set", "train.updates=7", "--json")
    shown = json.loads(typed(*words).stdout)
    assert shown["train"]["updates"] == 7
    assert shown["run"]["name"] == "quickstart"


def test_the_quickstart_run_file_is_the_packaged_one() -> None:
    link = ROOT / "deploy/runs/quickstart.toml"
    assert not link.readlink().is_absolute()
    assert link.resolve() == ROOT / "agentrl/training/quickstart.toml"


def test_every_run_file_in_deploy_is_valid() -> None:
    for file in (ROOT / "deploy/runs").glob("*.toml"):
        load(file)
