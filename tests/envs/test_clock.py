"""A task's own clock: a certificate that has expired is valid again, and where the clock does not stand,
nothing counts."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from faulty_backend import FIX, KEY, FaultyBackend, admission_of, attempt, small_task

from agentrl.errors import SandboxError, TaskError
from agentrl.types import Action, EvidenceKey, Task, Termination
from envs import clock, grading
from envs.admission import admit
from envs.clock import Clock
from envs.evidence import Admission
from envs.sandbox.backends import checked
from envs.sandbox.contract import Backend, ExecRequest
from envs.sandbox.docker import DockerBackend
from envs.sandbox.local import LocalBackend
from envs.sandbox.plain import PlainBackend
from envs.session import Session, prepare

NOON = "2024-05-01T12:00:00Z"
NOON_S = datetime(2024, 5, 1, 12, tzinfo=UTC).timestamp()
CANNED = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQga5uoSoV9EYqYQOqM
pNNsIOwJ7SEMgQkB7BlacGnH3hChRANCAAQj+MenusdjJsqv2hjnpwi6GUCOlsSJ
sx6VFRuUO1oUP9uV9cO4OEmIG3t5Kg220LD/riFP/k9cnjIIh66PllnF
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBnDCCAUKgAwIBAgIUbt8FmTRptmBbZQ+nMCbu83IrQ7UwCgYIKoZIzj0EAwIw
FzEVMBMGA1UEAwwMc2VydmljZS50ZXN0MB4XDTI0MDQzMDEyMDAwMVoXDTI0MDUw
MjEyMDAwMVowFzEVMBMGA1UEAwwMc2VydmljZS50ZXN0MFkwEwYHKoZIzj0CAQYI
KoZIzj0DAQcDQgAEI/jHp7rHYybKr9oY56cIuhlAjpbEibMelRUblDtaFD/blfXD
uDhJiBt7eSoNttCw/64hT/5PXJ4yCIeuj5ZZxaNsMGowHQYDVR0OBBYEFHpiVFMq
aGM/rVuIkDOza4DsFJAOMB8GA1UdIwQYMBaAFHpiVFMqaGM/rVuIkDOza4DsFJAO
MA8GA1UdEwEB/wQFMAMBAf8wFwYDVR0RBBAwDoIMc2VydmljZS50ZXN0MAoGCCqG
SM49BAMCA0gAMEUCIAv+fdvnVaugQ0tSt8pDgWn39O/z12kkkhO5K03hQKENAiEA
03e4GWptJnUdtaXwmbVyYFGwNZ3SC4szp+oqoXvrZ3k=
-----END CERTIFICATE-----
"""
"""A key and its certificate, canned once for two days: 2024-04-30 to 2024-05-02, both at noon."""
HIDDEN = """\
import os, ssl, subprocess, sys, time
from cart import total

HERE = os.path.join(os.path.dirname(__file__), "canned.pem")


def greeted():
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(HERE)
    asking = ssl.create_default_context(cafile=HERE)
    client = asking.wrap_bio(back, there, server_hostname="service.test")
    server = serving.wrap_bio(there, back, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            pass
    return client.getpeercert()["subject"]


def test_negative():
    assert greeted() == ((("commonName", "service.test"),),)
    assert total(-2, -3) == -5


def test_its_children():
    \"\"\"A child, and what the child starts, live on the same day.\"\"\"
    inner = [sys.executable, "-c", "import time; print(int(time.time()))"]
    outer = ["bash", "-c", 'date +%s; printf "%(%s)T\\n" -1; exec "$@"', "_", *inner]
    said = subprocess.run(outer, capture_output=True, text=True)
    assert said.stderr == ""
    for each in said.stdout.split():
        assert -1 <= int(each) - int(time.time()) <= 0
"""


def dated(folder: Path, at: str | None = NOON) -> Task:
    return small_task(
        folder,
        tests={"test_hidden.py": HIDDEN, "canned.pem": CANNED},
        pass_to_pass=["test_cart.py::test_zero", "test_hidden.py::test_its_children"],
        timeout_sec=30,
        **({} if at is None else {"clock": at}),
    )


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    """A library that a test replaced is nobody else's."""
    clock._library.cache_clear()
    yield
    clock._library.cache_clear()


def admitted(task: Task, backend: Backend) -> Admission:
    async def run() -> Admission:
        try:
            return await admit(task, backend, light=True)
        finally:
            await backend.close()

    return asyncio.run(run())


def test_a_certificate_that_has_expired_is_valid_under_the_tasks_clock_and_quarantines_it_without(
    tmp_path: Path,
) -> None:
    assert admitted(dated(tmp_path / "with"), FaultyBackend()).reasons == ()
    without = admitted(dated(tmp_path / "without", None), FaultyBackend())
    assert not without.valid
    assert "solution: does not pass in run 1: test_hidden.py::test_negative" in without.reasons[0]
    assert "certificate has expired" in without.reasons[0]
    early = admitted(dated(tmp_path / "early", "2024-04-29T12:00:00Z"), FaultyBackend())
    assert "certificate is not yet valid" in early.reasons[0]


def test_a_verdict_says_under_which_clock_it_was_made(tmp_path: Path) -> None:
    verdict = attempt(dated(tmp_path / "t"), FIX)
    assert verdict.reward == 1.0
    facts = {link.key: link.facts for link in verdict.evidence}
    for key in (EvidenceKey.E1_START, EvidenceKey.E7_FRESH_VERIFIER):
        assert facts[key]["clock"] == "2024-05-01T12:00:00+00:00"
    bare = attempt(small_task(tmp_path / "bare"), FIX)
    assert not any("clock" in link.facts for link in bare.evidence)


def lives_on_its_day(folder: Path, backend: Backend) -> None:
    """A whole attempt; a timeout is still real."""
    task = dated(folder)
    task = replace(task, limits=replace(task.limits, exec_timeout_s=2.0))

    async def run() -> None:
        try:
            validated = await admission_of(task, backend)
            async with await Session.open(
                task, backend, session_id="agent", signing_key=KEY, admission=validated
            ) as session:

                async def said(command: str) -> str:
                    result = await session.exec(
                        ExecRequest(exec_id=session.next_exec_id(), command=command, timeout_s=10.0)
                    )
                    return result.stdout.text() + result.stderr.text()

                first = float(await said("date +%s.%N"))
                assert 0 <= first - NOON_S < 60
                assert float(await said("date +%s.%N")) > first, "it goes on from command to command"
                begun = time.monotonic()
                hung = await session.call(Action(id="1", tool="bash", arguments={"command": "sleep 600"}))
                assert (hung.status, 2.0 <= time.monotonic() - begun < 60.0) == ("timeout", True)
                await session.call(Action(id="2", tool=FIX[0], arguments=FIX[1]))
                verdict = await session.finalize(termination=Termination.FINISHED, fault=None)
            assert verdict.reward == 1.0
        finally:
            await backend.close()

    asyncio.run(run())


def test_in_a_sandbox_a_task_lives_on_its_day_with_its_children(
    tmp_path: Path, backend: LocalBackend
) -> None:
    lives_on_its_day(tmp_path / "t", backend)


@pytest.mark.docker
def test_in_a_container_a_task_lives_on_its_day(tmp_path: Path) -> None:
    made = DockerBackend(tmp_path / "state")
    try:
        made.check()
    except SandboxError as error:
        pytest.skip(str(error))
    lives_on_its_day(tmp_path / "t", made)


@pytest.mark.kubernetes
def test_in_a_pod_a_task_lives_on_its_day(tmp_path: Path) -> None:
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no cluster")
    try:
        made = checked("kubernetes", tmp_path / "state")
    except SandboxError as error:
        pytest.skip(str(error))
    lives_on_its_day(tmp_path / "t", made)


# ---------------------------------------------------------------------------------- where it does not stand


class _Deaf(PlainBackend):
    """Its Python is one into which nothing can be preloaded, as one that is linked statically."""

    def __init__(self, folder: Path) -> None:
        program = folder / "python3"
        program.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {sys.executable} "$@"\n')
        program.chmod(0o755)
        super().__init__(python=str(program))


def _garbage(folder: Path) -> Path:
    """A library that no loader takes, as one for another machine."""
    made = folder / "broken"
    made.mkdir()
    (made / clock.LIBRARY).write_bytes(b"not for this machine")
    return made


def _dying(folder: Path) -> Path:
    """One that lets no program start, as one for another libc."""
    made = folder / "dying"
    made.mkdir()
    shutil.copyfile(clock._library() / clock.LIBRARY, made / clock.LIBRARY)
    raw = (made / clock.LIBRARY).read_bytes()
    (made / clock.LIBRARY).write_bytes(raw.replace(b"libm.so.6\0", b"libz.so.9\0"))
    return made


@pytest.mark.parametrize("how", ["another machine's library", "another libc's library", "a deaf python"])
def test_where_the_clock_does_not_stand_there_is_no_session_no_reward_and_a_name_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    task = dated(tmp_path / "t")
    backend = _Deaf(tmp_path) if how == "a deaf python" else PlainBackend()
    if how != "a deaf python":
        made = _garbage(tmp_path) if how.startswith("another machine") else _dying(tmp_path)
        monkeypatch.setattr(clock, "_library", lambda: made)
        monkeypatch.setattr(clock._library, "cache_clear", lambda: None, raising=False)

    async def run() -> None:
        image = await prepare(task, backend)
        with pytest.raises(TaskError) as caught:
            await Session.open(task, backend, session_id="a", signing_key=KEY, admission=None)
        assert (caught.value.code, caught.value.owner) == ("clock_not_held", "task")
        assert "glibc" in str(caught.value)
        verdict = await grading.grade(
            task,
            backend,
            image=image,
            changes=(),
            session="a",
            seen=(),
            admission=None,
            signing_key=KEY,
        )
        assert (verdict.reward, verdict.components) == (None, {})
        assert verdict.fault is not None
        assert verdict.fault.code == "clock_not_held"
        validated = await admit(task, backend, light=True)
        assert not validated.valid
        assert "does not stand" in validated.reasons[0]
        assert not backend._live
        await backend.close()

    asyncio.run(run())


def test_without_the_library_nothing_starts_and_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SandboxError, match=r"pip install 'agentrl\[clock\]'") as caught:
        Clock.of(dated(tmp_path / "t"))
    assert (caught.value.code, caught.value.owner, caught.value.retryable) == (
        "clock_missing",
        "environment",
        False,
    )
    assert Clock.of(small_task(tmp_path / "u")) is None, "a task without a clock needs none"


def test_a_clock_that_was_started_by_another_process_goes_on(tmp_path: Path) -> None:
    task = dated(tmp_path / "t")
    first = Clock.of(task)
    assert first is not None
    later = Clock.of(task, noted=str(first.offset_s - 3600))
    assert later is not None
    request = ExecRequest(exec_id="1", command="date", env={"A": "b"})
    assert later.dressed(request).env["FAKETIME"] == f"{first.offset_s - 3600:+d}"
    assert later.dressed(request).env["A"] == "b"
    assert first.dressed(first.dressed(request)) == first.dressed(request)


# ------------------------------------------------------------------------------------------------ the package


@pytest.mark.parametrize(
    "written",
    [NOON, "2024-05-01T14:00:00+02:00", datetime(2024, 5, 1, 12, tzinfo=UTC)],
    ids=["text", "another zone", "a TOML time"],
)
def test_a_package_names_its_clock_with_its_zone(tmp_path: Path, written: Any) -> None:
    task = dated(tmp_path / "t", written)
    assert task.clock == datetime(2024, 5, 1, 12, tzinfo=UTC)
    assert "clock" not in task.metadata


@pytest.mark.parametrize(
    ("written", "what"),
    [
        ("2024-05-01T12:00:00", "has no zone"),
        ("yesterday", "is no time"),
        ("", "is no time"),
        ("1970-01-01T00:00:00Z", "too far away"),
        ("2500-01-01T00:00:00Z", "too far away"),
        (1714564800, "is int, not str or datetime"),
        (datetime(2024, 5, 1), "has no zone"),
    ],
)
def test_a_clock_that_is_no_time_is_refused_by_file_and_key(tmp_path: Path, written: Any, what: str) -> None:
    with pytest.raises(TaskError, match=what) as caught:
        dated(tmp_path / "t", written)
    assert "task.toml: metadata.agentrl.clock" in str(caught.value)
    assert caught.value.fix
