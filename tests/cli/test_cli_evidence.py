"""What is stored is found by the beginning of its name and shown whole."""

from __future__ import annotations

import itertools
import json
import sqlite3
from pathlib import Path

import pytest
from made import INSTRUCTION, fill

from agentrl.store import Store


def test_trajectories_are_listed_newest_first_with_filters(here, typed) -> None:
    result = typed("trajectories", "list", "--phase", "heldout_after", "--limit", "3", "--json")
    shown = json.loads(result.stdout)
    assert shown["run"] == here.run_id
    assert [row["id"] for row in shown["trajectories"]] == here.ids("heldout_after")[:-4:-1]
    lost = json.loads(typed("trajectories", "list", "--termination", "fault", "--json").stdout)[
        "trajectories"
    ]
    assert [row["fault_owner"] for row in lost] == ["environment"]
    assert lost[0]["reward"] is None


def test_a_piped_list_is_tab_separated_and_whole(here, typed) -> None:
    lines = typed("trajectories", "list", "--limit", "2").stdout.splitlines()
    assert lines[0].split("\t")[0] == "id"
    assert len(lines) == 3
    assert lines[1].split("\t")[0] == here.ids("heldout_after")[-1]


def test_a_trajectory_is_shown_turn_by_turn(here, typed) -> None:
    name = here.ids("heldout_after")[0]
    shown = typed("trajectories", "show", name)
    assert shown.exit_code == 0
    text = shown.stdout
    first = len(INSTRUCTION.encode()) + len("user\nassistant\n") + 3
    assert f"turn 1 · prompt {first} tokens ({first} new)" in text
    assert '<tool_call>{"name": "read_file"' in text
    assert "def amber(a, k):" in text
    assert "log-prob mean -0.250, min -0.250" in text
    assert "policy version 4" in text
    assert "→ read_file exited 0" in text
    for number in range(1, 11):
        assert f"✓ E{number} " in text
    assert "passed test_cart.py::test_grove" in text
    assert "signed abababab" in text


def test_token_counts_add_up_over_the_turns_of_a_trajectory(here, typed) -> None:
    turns = json.loads(typed("trajectories", "show", here.ids("heldout_after")[0], "--json").stdout)["turns"]
    assert len(turns) > 2
    for before, after in itertools.pairwise(turns):
        kept = before["prompt_tokens"] + before["generated_tokens"]
        assert after["prompt_tokens"] == kept + after["new_tokens"]


def test_a_fault_is_shown_with_its_owner_and_what_is_unknown_is_not_true(here, typed) -> None:
    lost = json.loads(typed("trajectories", "list", "--termination", "fault", "--json").stdout)[
        "trajectories"
    ][0]["id"]
    text = typed("trajectories", "show", lost).stdout
    assert "reward none" in text
    assert "fault of the environment (sandbox_lost, exec): The sandbox is gone." in text
    assert "✓ E5 " in text
    assert "? E6 " in text
    assert "? E10" in text
    assert "→ read_file no answer" in text
    evidence = json.loads(typed("trajectories", "show", lost, "--json").stdout)["evidence"]
    assert [link["holds"] for link in evidence] == [True] * 5 + [None] * 5


def test_a_demonstration_has_no_log_probs_and_no_version_rather_than_zeros(here, typed) -> None:
    name = here.ids("demonstration")[0]
    assert "no log-probs · no policy version" in typed("trajectories", "show", name).stdout
    turn = json.loads(typed("trajectories", "show", name, "--json").stdout)["turns"][0]
    assert turn["log_prob_mean"] is None
    assert turn["versions"] == []


def test_actions_stand_in_for_text_when_the_tokenizer_is_gone(tmp_path, typed) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    fill(f"sqlite:///{folder / 'store.db'}", folder, updates=1, heldout=1)
    (folder / "tokenizer" / "tokenizer.json").unlink()
    text = typed("trajectories", "show", "heldout_after-0-0.0", "--store", folder).stdout
    assert 'read_file(path="cart.py")' in text
    assert "<tool_call>" not in text


def test_a_run_is_found_by_id_prefix_name_folder_and_default(here, typed) -> None:
    for word in (here.run_id[:5], "made", "runs/made"):
        assert json.loads(typed("runs", "show", word, "--json").stdout)["id"] == here.run_id
    assert json.loads(typed("runs", "show", "--json").stdout)["id"] == here.run_id


def test_a_store_is_named_by_option_or_environment(made, tmp_path, monkeypatch, typed) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGENTRL_STORE", raising=False)
    assert typed("runs", "list").exit_code == 2
    assert made.run_id in typed("runs", "list", "--store", made.folder).stdout
    assert made.run_id in typed("runs", "list", "--store", made.store).stdout
    monkeypatch.setenv("AGENTRL_STORE", made.store)
    assert made.run_id in typed("runs", "list").stdout


def test_a_run_is_shown_in_numbers(here, typed) -> None:
    shown = json.loads(typed("runs", "show", "--json").stdout)
    after = shown["phases"]["heldout_after"]
    assert after["attempts"] == after["graded"] == 12
    assert after["success"] == after["solved"] / 12
    assert sum(after["termination"].values()) == 12
    assert shown["phases"]["train"]["fault"] == {"environment/sandbox_lost": 1}
    assert shown["updates"] == 4
    assert shown["latest_version"]["number"] == 4
    assert shown["metrics"]["reward/mean"]["step"] == 4


def test_verify_says_what_was_checked_and_1_for_a_change(tmp_path: Path, typed) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run_id = fill(f"sqlite:///{folder / 'store.db'}", folder, updates=1, heldout=2)
    whole = typed("verify", run_id[:6], "--store", folder, "--json")
    assert whole.exit_code == 0
    assert json.loads(whole.stdout)["ok"] is True
    with sqlite3.connect(folder / "store.db") as database:
        database.execute(
            "update verdicts set reward = 1 - reward where trajectory_id = 'heldout_before-0-0.0.1'"
        )
    broken = typed("verify", "--store", folder, "--json")
    assert broken.exit_code == 1
    assert json.loads(broken.stdout)["broken_id"] == "heldout_before-0-0.0.1"
    assert "is broken at heldout_before-0-0.0.1" in typed("verify", "--store", folder).stdout


def test_report_is_written_where_it_is_asked_for(here, tmp_path, typed) -> None:
    target = tmp_path / "deep" / "page.html"
    shown = json.loads(typed("report", "made", "--out", target, "--json").stdout)
    assert shown["report"] == str(target)
    assert shown["bytes"] == target.stat().st_size
    assert typed("report").stdout.strip() == str(here.folder / "report.html")


def test_a_listed_store_is_not_changed_by_looking(here, typed) -> None:
    with Store.open(here.store) as store:
        before = store.run(here.run_id).head
    typed("runs", "list")
    typed("trajectories", "list")
    with Store.open(here.store) as store:
        assert store.run(here.run_id).head == before


@pytest.mark.parametrize(
    "verb", [("runs", "list"), ("runs", "show"), ("verify",), ("trajectories", "list"), ("doctor",)]
)
def test_json_is_exactly_one_object_on_stdout(verb: tuple[str, ...], here, typed) -> None:
    shown = typed(*verb, "--json").stdout
    assert shown.count("\n") == 1
    assert isinstance(json.loads(shown), dict)
