"""Images from the command line: listed by how long nobody used them, removed when nobody needs them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from disks import aged

from agentrl.cli.output import size
from envs.sandbox.local import LocalBackend
from envs.sandbox.plain import PlainBackend


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Three things, asked for 1, 10 and 100 hours ago."""
    state = tmp_path / "state"

    async def run() -> None:
        backend = LocalBackend(state)
        for name, hours in (("a", 10), ("b", 100), ("c", 1)):
            folder = tmp_path / name
            folder.mkdir()
            (folder / "file").write_text(name * 9000)
            digest = await backend.prepare(str(folder))
            aged(state, state / "images" / digest.replace(":", "-"), 3600 * hours)
        await backend.close()

    asyncio.run(run())
    return state


def test_what_is_kept_is_listed_the_longest_unused_first(state: Path, typed) -> None:
    result = typed("images", "list", "--state-dir", state, "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    ages = [image["used_at"] for image in shown["images"]]
    assert ages == sorted(ages)
    assert {image["kind"] for image in shown["images"]} == {"workspace"}
    assert {image["users"] for image in shown["images"]} == {0}
    assert shown["bytes"] == sum(image["bytes"] for image in shown["images"]) >= 3 * 9000
    text = typed("images", "list", "--state-dir", state).stdout
    assert "3 on local" in text
    assert shown["images"][0]["id"] in text


def test_pruning_removes_what_is_old_and_says_beforehand_what_that_is(state: Path, typed) -> None:
    def prune(*words: str) -> dict:
        result = typed("images", "prune", "--state-dir", state, "--json", *words)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    assert prune()["removed"] == [], "the default is a week"
    planned = prune("--older-than", "5h", "--dry-run")
    assert (len(planned["removed"]), planned["kept"], planned["dry_run"]) == (2, 1, True)
    assert len(list((state / "images").iterdir())) == 3
    done = prune("--older-than", "5h")
    assert (done["removed"], done["bytes"]) == (planned["removed"], planned["bytes"])
    assert [path.name for path in (state / "images").iterdir()] != []
    left = json.loads(typed("images", "list", "--state-dir", state, "--json").stdout)["images"]
    assert len(left) == 1
    assert done["stayed"] == []


def test_pruning_to_a_size_removes_no_more_than_that_needs(state: Path, typed) -> None:
    listed = json.loads(typed("images", "list", "--state-dir", state, "--json").stdout)
    gib = (listed["bytes"] - 1) / 1024**3
    words = ("images", "prune", "--state-dir", state, "--keep-gib", f"{gib:.12f}")
    done = json.loads(typed(*words, "--json").stdout)
    assert [image["id"] for image in done["removed"]] == [listed["images"][0]["id"]]
    text = typed("images", "prune", "--state-dir", state, "--older-than", "0s").stdout
    assert "2 removed" in text
    assert "0 kept: 0 in use, 0 asked for in the last 15 minutes" in text


def test_what_was_just_asked_for_stays_whatever_is_said(state: Path, tmp_path: Path, typed) -> None:
    async def run() -> None:
        plain = PlainBackend(state)  # it shares the folder, and holds nothing
        await plain.prepare(str(tmp_path / "a"))
        await plain.close()

    asyncio.run(run())
    text = typed("images", "prune", "--state-dir", state, "--older-than", "0s").stdout
    assert "2 removed" in text
    assert "1 kept: 0 in use, 1 asked for in the last 15 minutes" in text


@pytest.mark.parametrize("words", ["7", "d", "-1d", "1w", "1 day", "[b]x"])
def test_a_length_of_time_that_is_none_is_refused_with_how_to_write_it(
    state: Path, typed, words: str
) -> None:
    result = typed("images", "prune", "--state-dir", state, f"--older-than={words}")
    assert result.exit_code == 2
    assert "90m, 12h or 7d" in result.stderr
    assert len(list((state / "images").iterdir())) == 3


def test_sizes_are_written_as_people_read_them() -> None:
    assert [size(n) for n in (None, 0, 1023, 1024, 1536, 5 << 20, 3 << 30, 5 << 40, 5000 << 40)] == [
        "–", "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 MiB", "3.0 GiB", "5.0 TiB", "5000.0 TiB",
    ]  # fmt: skip
