"""What tenants keep of their sessions: once per key, bounded, and gone when it is over. On both databases."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from test_store_sessions import ADA, row

from agentrl.store import SnapshotRow, SnapshotsFull, Store, Superseded


def snapshot(name: str, **changes: object) -> SnapshotRow:
    made = SnapshotRow(
        id=name,
        tenant="ada",
        client_key=f"key of {name}",
        body_hash="h",
        session_id="s",
        task_id="suite/one",
        task_revision="r",
        image_digest="sha256:image",
        digest="d",
        changes=1,
        bytes=10,
        processes=0,
        created_at=1.0,
        expires_at=100.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def epoch(store: Store) -> int:
    store.add_tenant(ADA)
    store.add_tenant(replace(ADA, name="bob", token_hash="other"))
    epoch = store.begin_gateway("g")
    store.append_sessions("g", epoch, [row("s", epoch)], [])
    return epoch


def keep(store: Store, epoch: int, made: SnapshotRow, body: bytes = b"0123456789", **limits: int) -> object:
    most = {"most": 2, "most_bytes": 25, **limits}
    return store.add_snapshot("g", epoch, made, body, **most)


def test_a_key_is_one_snapshot_whole_and_of_its_tenant_only(store: Store, epoch: int) -> None:
    first = snapshot("a")
    assert keep(store, epoch, first) == (first, True)
    assert keep(store, epoch, replace(first, id="b", digest="other"), b"abcdefghij") == (first, False)
    assert store.snapshot_body("a") == b"0123456789"
    assert store.snapshot_body("b") is None
    assert store.find_snapshot("ada", 5.0, snapshot_id="a") == first
    assert store.find_snapshot("ada", 5.0, client_key=first.client_key) == first
    assert store.find_snapshot("bob", 5.0, snapshot_id="a") is None
    assert store.snapshots("bob", 5.0) == ()
    assert not store.remove_snapshot("bob", "a")
    assert store.snapshots("ada", 5.0) == (first,)
    assert store.remove_snapshot("ada", "a")
    assert not store.remove_snapshot("ada", "a")
    assert store.snapshot_body("a") is None


def test_a_tenant_keeps_so_many_and_so_much_and_no_more(store: Store, epoch: int) -> None:
    keep(store, epoch, snapshot("a"))
    with pytest.raises(SnapshotsFull, match="keeps 1 snapshots of 10 bytes; this one has 16"):
        keep(store, epoch, snapshot("b", bytes=16), b"x" * 16)
    keep(store, epoch, snapshot("b"))
    with pytest.raises(SnapshotsFull, match="Delete one"):
        keep(store, epoch, snapshot("c", bytes=1), b"x")
    keep(store, epoch, snapshot("d", tenant="bob"))  # another tenant has a share of its own
    store.remove_snapshot("ada", "a")
    keep(store, epoch, snapshot("c", bytes=1), b"x")
    assert [each.id for each in store.snapshots("ada", 5.0)] == ["b", "c"]


def test_two_that_come_at_once_do_not_both_take_the_last_place(store: Store, epoch: int) -> None:
    outcomes: list[object] = []

    def one(name: str) -> None:
        try:
            outcomes.append(keep(store, epoch, snapshot(name), most=1))
        except SnapshotsFull as error:
            outcomes.append(error)

    threads = [threading.Thread(target=one, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(isinstance(each, SnapshotsFull) for each in outcomes) == 3
    assert len(store.snapshots("ada", 5.0)) == 1


def test_what_has_expired_is_not_found_not_counted_and_removed(store: Store, epoch: int) -> None:
    keep(store, epoch, snapshot("a", expires_at=50.0), most=1)
    assert store.find_snapshot("ada", 49.9, snapshot_id="a") is not None
    assert store.find_snapshot("ada", 50.0, snapshot_id="a") is None
    assert store.snapshots("ada", 50.0) == ()
    again = snapshot("b", client_key="key of a", created_at=50.0)
    assert keep(store, epoch, again, most=1) == (again, True)
    assert store.snapshot_body("a") is None
    assert store.sweep_snapshots(99.0) == 0
    assert store.sweep_snapshots(100.0) == 1


def test_a_gateway_that_was_replaced_keeps_nothing_more(store: Store, epoch: int) -> None:
    store.begin_gateway("g")
    with pytest.raises(Superseded):
        keep(store, epoch, snapshot("a"))
    assert store.snapshots("ada", 5.0) == ()
