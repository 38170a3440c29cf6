"""What is read back equals what was added, bit by bit, whatever it was."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_records import any_trajectory, trajectory

from agentrl.errors import EvidenceError
from agentrl.store import Store
from agentrl.store.codec import (
    LogProbColumns,
    compress,
    decompress,
    ids_from_bytes,
    ids_to_bytes,
    pack_log_probs,
    unpack_log_probs,
)
from agentrl.store.layout import assemble, differences, explode
from agentrl.store.prompts import checked_bytes
from agentrl.types import Trajectory, to_json

QUICK = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)


@QUICK
@given(batch=st.lists(any_trajectory(), min_size=1, max_size=3))
def test_any_trajectories_come_back_equal_to_the_bit_and_the_run_verifies(
    shared_store: Store, batch: list[Trajectory]
) -> None:
    run = shared_store.begin_run("p", config={}, algo="none", seed=0).id
    for record in batch:
        shared_store.add_trajectory(run, record, step=3)
    streamed = list(shared_store.iter_trajectories(run))
    assert streamed == batch
    assert [to_json(r) for r in streamed] == [
        to_json(r) for r in batch
    ]  # also tells -0.0 from 0.0, 1 from True
    assert shared_store.trajectory(batch[0].id) == batch[0]
    report = shared_store.verify(run)
    assert report.why is None
    assert report.calls_checked == sum(len(r.calls) for r in batch)


@QUICK
@given(record=any_trajectory())
def test_the_prompts_hashed_along_the_parents_are_the_prompts_rebuilt_along_the_parents(
    record: Trajectory,
) -> None:
    for call, raw in zip(record.calls, checked_bytes(record.calls), strict=True):
        prompt = record.prompt_ids(call.id)
        assert raw.n_prompt == len(prompt)
        assert ids_from_bytes(raw.delta) == call.prompt_delta


@QUICK
@given(record=any_trajectory())
def test_exploding_and_assembling_are_inverse(record: Trajectory) -> None:
    rows = explode(record, phase="train", step=None)
    again = assemble(rows)
    assert again == record
    assert differences(rows, explode(again, phase="train", step=None)) is None


@given(st.lists(st.none() | st.floats(max_value=0.0, allow_nan=False, allow_infinity=False), max_size=40))
def test_log_probs_keep_every_bit_and_every_null(log_probs: list[float | None]) -> None:
    given_T = tuple(log_probs)
    assert repr(unpack_log_probs(pack_log_probs(given_T), len(given_T))) == repr(given_T)


def test_float32_log_probs_take_four_bytes_each_and_nulls_take_none() -> None:
    packed = pack_log_probs((-0.5, None, -2.0))
    assert packed.width == 4
    assert packed.values == bytes.fromhex("000000bf000000c0")
    assert packed.valid == bytes([0b101])
    assert pack_log_probs((-0.1,)).width == 8  # 0.1 is no float32: kept whole, not rounded
    assert pack_log_probs(None) == LogProbColumns(values=None, valid=None, width=None)


def test_ids_are_int32_little_endian_and_a_larger_one_is_refused() -> None:
    assert ids_to_bytes((1, 2**31 - 1)) == bytes.fromhex("01000000ffffff7f")
    with pytest.raises(EvidenceError, match="31 bits: 2147483648"):
        ids_to_bytes((1, 2**31))


@pytest.mark.parametrize(
    "columns",
    [
        LogProbColumns(values=b"\0" * 4, valid=None, width=4),
        LogProbColumns(values=b"\0" * 8, valid=b"\x07", width=4),
        LogProbColumns(values=b"\0" * 8, valid=b"\x11", width=4),
        LogProbColumns(values=b"\0" * 8, valid=b"\x03\0", width=4),
        LogProbColumns(values=b"\0" * 6, valid=None, width=3),
    ],
)
def test_log_prob_columns_that_contradict_each_other_are_refused(columns: LogProbColumns) -> None:
    with pytest.raises(EvidenceError):
        unpack_log_probs(columns, 3)


def test_a_frame_of_another_size_than_expected_is_refused_before_it_is_unpacked() -> None:
    with pytest.raises(EvidenceError, match="says 1000000 bytes"):
        decompress(compress(bytes(10**6)), size=8)
    with pytest.raises(EvidenceError, match="can not be unpacked"):
        decompress(b"not a frame")


def test_two_stores_give_the_same_evidence_the_same_hash() -> None:
    name = uuid.uuid4().hex
    one, two = (explode(trajectory(name), phase="train", step=1).trajectory["content_hash"] for _ in range(2))
    assert one == two
    assert one != explode(trajectory(name), phase="train", step=2).trajectory["content_hash"]
