"""The report: numbers by hand, one file that needs nothing, content that can not become markup."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from made import attempt, fill, tokenizer

from agentrl.store import Store
from agentrl.training.charts import Line, lines, shares, ticks
from agentrl.training.report import Rate, clipped, config_text, render, tool_use, wilson, write_report

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Balanced(HTMLParser):
    """Fails on a tag that closes another."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> Balanced:
    reader = Balanced()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def page(made) -> str:
    with Store.open(made.store) as store:
        return render(store, made.run_id)


def test_the_page_is_whole_html(page: str) -> None:
    tags = [tag for tag, _ in parsed(page).seen]
    assert tags.count("h2") == 6
    assert tags.count("svg") > 10


def test_the_page_needs_no_network_and_no_script(page: str) -> None:
    assert not re.search(r"https?://|//cdn|@import|url\(", page)
    tags = parsed(page).seen
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags}
    assert not [a for _, attributes in tags for a in attributes if a.startswith("on") or a in ("src", "href")]


def test_the_headline_is_what_the_store_holds(page: str, made) -> None:
    with Store.open(made.store) as store:
        rows = store.trajectories(made.run_id, phase="heldout_after", limit=None)
    solved = sum(row.reward == 1.0 for row in rows)
    text = " ".join(parsed(page).text.split())
    assert f"{solved} of {len(rows)} after" in text
    assert f"{100 * solved / len(rows):.1f} %" in text
    assert "evidence chain whole" in text
    assert "environment: sandbox_lost × 1" in text


def test_three_attempts_are_shown_with_their_text_and_evidence(page: str) -> None:
    text = parsed(page).text
    for title in ("A success after training", "A failure after training", "One from before"):
        assert title in text
    assert '<tool_call>{"name": "replace_in_file"' in text
    assert text.count("judged in a fresh sandbox") == 3


def test_what_a_policy_writes_can_not_become_markup(tmp_path) -> None:
    words = tokenizer()
    url = f"sqlite:///{tmp_path / 'store.db'}"
    with Store.open(url) as store:
        run = store.begin_run("<b>run</b>", config={"run": {"dir": str(tmp_path)}}, algo="grpo", seed=1)
        one = attempt("x", group="g", index=0, version=0, solved=True, tested=True, at=1.0, words=words)
        seen = replace(one.turns[0].observations[0], text="<script>alert(1)</script></pre></details>")
        turns = (replace(one.turns[0], observations=(seen,)), *one.turns[1:])
        store.add_trajectory(run.id, replace(one, turns=turns), phase="heldout_after")
        page = render(store, run.id)
    assert "script" not in {tag for tag, _ in parsed(page).seen}
    assert "<script>alert(1)</script></pre></details>" in parsed(page).text


def test_a_run_without_anything_still_has_a_page(tmp_path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        run = store.begin_run("empty", config={}, algo="ppo", seed=1)
        written = write_report(store, run.id, tmp_path / "a" / "report.html")
    text = parsed(written.read_text()).text
    assert "This run has no graded held-out attempts." in text
    assert "No attempts are stored." in text
    assert [p.name for p in written.parent.iterdir()] == ["report.html"]


def test_a_broken_chain_is_said_on_top(tmp_path) -> None:
    run_id = fill(f"sqlite:///{tmp_path / 'store.db'}", tmp_path, updates=1, heldout=1)
    with sqlite3.connect(tmp_path / "store.db") as database:
        database.execute("update trajectories set termination = 'format' where id = 'heldout_after-0-0.0.1'")
    with Store.open(tmp_path / "store.db") as store:
        text = parsed(render(store, run_id)).text
    assert "evidence chain broken" in text
    assert "Broken at heldout_after-0-0.0.1" in text


def test_wilson_interval_by_hand() -> None:
    """8 of 10, z = 1.96: centre (0.8 + 0.19208) / 1.38416, half 1.96 / 1.38416 sqrt(0.016 + 0.0096040)."""
    low, high = wilson(8, 10, 1.96)
    assert low == pytest.approx(0.49016, abs=1e-5)
    assert high == pytest.approx(0.94331, abs=1e-5)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 5)[0] == 0.0
    assert wilson(5, 5)[1] == 1.0
    assert Rate(k=0, n=0).value is None


def test_tool_use_counts_tests_before_the_submission_only() -> None:
    words = tokenizer()

    def one(tested: bool) -> object:
        return attempt("x", group="g", index=0, version=0, solved=True, tested=tested, at=1.0, words=words)

    use = tool_use([one(True), one(False)])  # type: ignore[list-item]
    assert use is not None
    assert use.tested == 0.5
    assert use.turns == 3.5
    assert use.tools == {"read_file": 1.0, "replace_in_file": 1.0, "run_tests": 0.5, "submit": 1.0}
    assert tool_use([]) is None


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0, 20, 4) == [0, 5, 10, 15, 20]
    assert ticks(3.0, 3.0) == [3.0]


def test_points_that_are_not_finite_are_left_out_of_a_drawing() -> None:
    drawn = lines([Line(name="x", colour="red", points=[(0, 1.0), (1, float("nan")), (2, 3.0)])])
    assert "nan" not in drawn
    assert "Nothing was measured" in lines([Line(name="x", colour="red", points=[(0, float("inf"))])])


def test_shares_fill_the_bar() -> None:
    drawn = shares({"a": 1, "b": 3}, {"a": "red", "b": "blue"})
    assert [float(w) for w in re.findall(r'<rect x="([\d.]+)"', drawn)] == [0.0, 180.0]
    assert "b: 3 (75.0 %)" in drawn


def test_config_is_shown_as_toml_without_what_is_not_set() -> None:
    assert config_text({"a": {"x": 1, "y": None, "b": {"z": "s"}}}) == '[a]\nx = 1\n\n[a.b]\nz = "s"'


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert clipped("a\x1b[2Jb\tc\nd\x07\x9b") == "a␛[2Jb\tc\nd␇\ufffd"


def test_long_text_keeps_head_and_tail() -> None:
    assert clipped("abc", 3) == "abc"
    assert clipped("a" * 20 + "b" * 10, 9) == "aaaaaa\n… 21 characters left out …\nbbb"
