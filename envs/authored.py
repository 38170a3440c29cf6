"""A module in a file that somebody wrote for a run: an environment, a backend."""

from __future__ import annotations

import importlib.util
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType


def module_in(file: Path) -> ModuleType:
    """The module in a file, loaded once for each content. Raises OSError for a file that can not be read, and
    whatever its code raises."""
    file = file.absolute()
    name = f"agentrl_authored_{sha256(str(file).encode() + file.read_bytes()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
