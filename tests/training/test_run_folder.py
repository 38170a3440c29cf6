"""Which run a folder holds, and what may go on with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import RunConfig, parse
from agentrl.errors import ConfigError
from agentrl.training.folder import RunFolder


def config(**sections: object) -> RunConfig:
    return parse({"run": {"name": "one"}, **sections})


def test_only_the_configuration_that_a_run_was_begun_with_goes_on_with_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(ConfigError, match="no run"):
        folder.check(config(), resume=True)
    assert folder.check(config(), resume=False) is None
    folder.begin("r1", config(train={"learning_rate": 1e-4}))
    assert folder.check(config(train={"learning_rate": 1e-4}), resume=True) == "r1"
    with pytest.raises(ConfigError, match="already holds run r1"):
        folder.check(config(), resume=False)
    for changed, keys in (
        ({"train": {"learning_rate": 2e-4}}, ["train.learning_rate"]),
        ({"train": {"learning_rate": 1e-4, "recipe": "dapo"}}, ["train.recipe"]),
        ({"train": {"learning_rate": 1e-4, "overrides": {"max_lag": 1}}}, ["train.overrides.max_lag"]),
        ({"train": {"learning_rate": 1e-4}, "rollout": {"group_size": 4}}, ["rollout.group_size"]),
        ({"train": {"learning_rate": 1e-4}, "policy": {"source": "other"}}, ["policy.source"]),
        ({"train": {"learning_rate": 1e-4}, "teacher": {"source": "one"}}, ["teacher.source"]),
        ({"rollout": {"groups": 2}}, ["rollout.groups", "train.learning_rate"]),
    ):
        with pytest.raises(ConfigError, match="another configuration") as caught:
            folder.check(config(**changed), resume=True)
        assert f"configuration: {', '.join(keys)} differ" in str(caught.value)


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"run": {"name": "one", "dir": "moved", "store": "sqlite:///moved.db"}},
        {"sandbox": {"gateway": "http://gateway:8080", "warm": 2}},
        {"policy": {"server": {"urls": ["http://one:8000"], "start_timeout_s": 5}}},
    ],
)
def test_a_run_goes_on_in_another_place(tmp_path: Path, elsewhere: dict[str, object]) -> None:
    folder = RunFolder(tmp_path)
    folder.begin("r1", config())
    assert folder.check(config(**elsewhere), resume=True) == "r1"


def test_a_note_that_was_cut_off_is_no_run_and_no_traceback(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for text in ("", "{", "[]", '{"run_id": "r1"}', '{"run_id": "r1", "config": {"gone": 1}}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ConfigError, match=r"run\.json"):
            folder.check(config(), resume=True)


def test_a_folder_is_held_by_one_process(tmp_path: Path) -> None:
    other = RunFolder(tmp_path).held()
    with RunFolder(tmp_path).held(), pytest.raises(ConfigError, match="Another process"):
        other.__enter__()
    with RunFolder(tmp_path).held():
        pass
