"""Weights out: whole or not at all, numbered, hashed, collected."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import learner_given as given
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.errors import ConfigError, EvidenceError, StoreError
from agentrl.learner import files
from agentrl.learner.model import Policy
from agentrl.learner.publish import (
    WEIGHTS,
    Keep,
    collect,
    export_state,
    latest,
    load_published,
    publish,
    retract_after,
    verify,
    versions,
)


@pytest.mark.parametrize("tied", [False, True])
def test_a_published_version_loads_back_bit_by_bit(tmp_path: Path, tied: bool) -> None:
    model = given.model(tied=tied)
    version = publish(Policy(model), tmp_path, parent=None, step=0)
    assert (version.number, version.parent, version.step) == (0, None, 0)
    for again in (load_published(version), AutoModelForCausalLM.from_pretrained(version.location)):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
        shared = again.get_input_embeddings().weight is again.get_output_embeddings().weight
        assert shared == tied
    child = publish(model, tmp_path, parent=version, step=3)
    assert (child.number, child.parent) == (1, 0)
    assert latest(tmp_path) == child
    assert child.content_hash == version.content_hash, "same weights, same hash"


def test_the_export_is_narrow_and_the_masters_stay_wide(tmp_path: Path) -> None:
    """MDL-02."""
    model = given.model()
    version = publish(model, tmp_path, parent=None, step=0, dtype=torch.bfloat16)
    again = AutoModelForCausalLM.from_pretrained(version.location)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.dtype != torch.bfloat16


def test_a_changed_byte_is_an_error_and_not_another_policy(tmp_path: Path) -> None:
    version = publish(given.model(), tmp_path, parent=None, step=0)
    verify(version)
    path = Path(version.location) / WEIGHTS
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(EvidenceError, match="content hash"):
        load_published(version)


def test_publishing_the_same_weights_twice_is_once_and_others_are_refused(tmp_path: Path) -> None:
    first = publish(given.model(), tmp_path, parent=None, step=0)
    assert publish(given.model(), tmp_path, parent=None, step=0) == first
    with pytest.raises(StoreError, match="already published with other weights"):
        publish(given.model(seed=1), tmp_path, parent=None, step=0)
    assert retract_after(tmp_path, -1) == [0]
    assert publish(given.model(seed=1), tmp_path, parent=None, step=0).number == 0


def test_old_versions_are_collected_by_rule_and_pinned_ones_stay(tmp_path: Path) -> None:
    parent = None
    for step in range(8):
        parent = publish(given.model(layers=1), tmp_path, parent=parent, step=step)
    assert collect(tmp_path, Keep(last=2, every=3), pinned=frozenset({1})) == [2, 4, 5]
    assert [v.number for v in versions(tmp_path)] == [0, 1, 3, 6, 7]
    with pytest.raises(ConfigError, match="delete the current"):
        Keep(last=0)
    assert parent is not None
    gone = parent.__class__(
        **{f: getattr(parent, f) for f in parent.__slots__} | {"location": str(tmp_path / "x")}
    )
    with pytest.raises(EvidenceError, match="is not at"):
        verify(gone)


def test_untied_weights_that_should_be_tied_are_not_published(tmp_path: Path) -> None:
    """MDL-08."""
    model = given.model(tied=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(ConfigError, match="tie"):
        publish(model, tmp_path, parent=None, step=0)
    assert versions(tmp_path) == []


def test_an_export_is_a_copy(tmp_path: Path) -> None:
    model = given.model()
    state = export_state(model)
    before = state["model.norm.weight"].clone()
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    assert torch.equal(state["model.norm.weight"], before)


KILLED = """
import sys, time
from pathlib import Path
from agentrl.learner import files
with files.whole_folder(Path(sys.argv[1])) as work:
    (work / "half").write_bytes(b"x" * 1000)
    print("writing", flush=True)
    time.sleep(60)
"""


def test_a_writer_killed_in_the_middle_leaves_nothing_a_reader_can_see(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "v000000")], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == b"writing\n"
        os.kill(child.pid, signal.SIGKILL)
        child.wait(timeout=10)
    assert latest(tmp_path) is None
    assert len(list(tmp_path.iterdir())) == 1, "the temporary folder is left over"
    version = publish(given.model(), tmp_path, parent=None, step=0)
    assert [p.name for p in tmp_path.iterdir()] == ["v000000"], "and cleaned up by the next writer"
    verify(version)


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), files.whole_folder(tmp_path / "f") as work:
        work.write_text("a folder can not be written like a file")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_gets_its_name_by_a_rename_and_not_by_a_copy(tmp_path: Path) -> None:
    with files.whole_folder(tmp_path / "f") as work:
        (work / "a").write_text("x")
        inode = work.stat().st_ino
        assert not (tmp_path / "f").exists()
    assert (tmp_path / "f").stat().st_ino == inode


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "pointer"
    files.write_whole(path, b"a" * 10)
    started = time.monotonic()
    for n in range(50):
        files.write_whole(path, bytes([97 + n % 2]) * 10)
        assert len(set(path.read_bytes())) == 1
        assert time.monotonic() - started < 20
    assert [p.name for p in tmp_path.iterdir()] == ["pointer"]
