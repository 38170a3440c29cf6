"""What runs before a sandbox is ready may say as much as it likes: nobody waits for a pipe to be read."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from agentrl.errors import SandboxError
from agentrl.types import SandboxSpec
from envs.sandbox import local
from envs.sandbox.local import LocalBackend
from envs.sandbox.plain import PlainBackend

pytestmark = pytest.mark.sandbox
SAYS = """#!/bin/sh
head -c 200000 /dev/zero | tr '\\0' x
head -c 200000 /dev/zero | tr '\\0' y >&2
echo 'the last word' >&2
exec sleep 60
"""


@pytest.mark.parametrize("name", ["plain", "local"])
def test_a_start_that_says_much_and_never_answers_ends_in_time_with_its_last_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SWE-ReX PR 301: undrained pipes filled, a blocking read froze the loop, the first cause was lost."""
    program = tmp_path / "python"
    program.write_text(SAYS)
    program.chmod(0o755)
    monkeypatch.setattr(local, "ZYGOTE_DEADLINE_S", 1.5)
    environment = tmp_path / "environment"
    environment.mkdir()
    (environment / "a.txt").write_text("a")

    async def run() -> tuple[SandboxError, float]:
        backend = (
            LocalBackend(tmp_path / "state", python=str(program))
            if name == "local"
            else PlainBackend(python=str(program))
        )
        lags, wait_s = [0.0], 1.5 if name == "plain" else 10.0

        async def tick() -> None:
            while True:
                begun = time.monotonic()
                await asyncio.sleep(0.01)
                lags.append(time.monotonic() - begun - 0.01)

        ticking = asyncio.create_task(tick())
        try:
            image = await backend.prepare(str(environment))
            with pytest.raises(SandboxError) as caught:
                await backend.create(SandboxSpec(image=image), image=image, session="s", deadline_s=wait_s)
        finally:
            ticking.cancel()
            await backend.close()
        return caught.value, max(lags)

    begun = time.monotonic()
    error, lag = asyncio.run(run())
    assert time.monotonic() - begun < 15
    assert (error.owner, error.retryable) == ("environment", True)
    assert error.code == ("start_timeout" if name == "plain" else "zygote")
    said = str(error.evidence["log"])
    assert said.rstrip().endswith("the last word")
    assert 4000 < len(said) <= 4096
    assert lag < 1.0, "the loop never waits for what is said"
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(program).encode() in _read(p)]
    assert not left


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
