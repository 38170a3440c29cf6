"""The log of a gateway's sessions: fenced, in order, once, and closed by its one end. On both databases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.errors import StoreError
from agentrl.store import SessionMove, SessionRow, Store, Superseded, TenantRow

ADA = TenantRow(name="ada", token_hash="h", weight=1.0, max_sessions=8, max_queue=8, added_at=1.0)


def row(name: str, epoch: int) -> SessionRow:
    return SessionRow(
        id=name,
        gateway="g",
        epoch=epoch,
        tenant="ada",
        client_key=f"key of {name}",
        body_hash="h",
        body="{}",
        task_id="suite/one",
        task_revision="r",
        created_at=1.0,
        state="queued",
        lease_epoch=1,
        lease_until=2.0,
    )


def move(name: str, seq: int, state: str, epoch: int, *, ended: bool = False) -> SessionMove:
    return SessionMove(
        session_id=name,
        seq=seq,
        at=10.0 + seq,
        epoch=epoch,
        state=state,
        owner=None,
        code=None,
        note="",
        lease_epoch=1,
        lease_until=20.0 + seq,
        ended=ended,
        verdict='{"reward":null}' if ended else None,
    )


def test_a_batch_is_whole_and_sent_again_it_is_once(store: Store) -> None:
    store.add_tenant(ADA)
    epoch = store.begin_gateway("g")
    opened = [row("a", epoch), row("b", epoch)]
    moves = [
        *(move("a", 0, "queued", epoch), move("b", 0, "queued", epoch), move("a", 1, "admitted", epoch)),
        move("a", 2, "failed", epoch, ended=True),
    ]
    for _ in range(2):
        store.append_sessions("g", epoch, opened, moves)
        assert [line.state for line in store.session_log("a")] == ["queued", "admitted", "failed"]
        assert [r.id for r in store.unended_sessions("g")] == ["b"]
    ended = store.session("a")
    assert (ended.state, ended.ended_at, ended.verdict) == ("failed", 12.0, '{"reward":null}')
    assert (store.session("b").state, store.session("b").lease_until) == ("queued", 20.0)
    assert store.find_session("ada", client_key="key of a") == ended
    assert store.find_session("bob", session_id="a") is None


def test_nothing_follows_an_end_and_nothing_of_that_batch_is_kept(store: Store) -> None:
    store.add_tenant(ADA)
    epoch = store.begin_gateway("g")
    store.append_sessions("g", epoch, [row("a", epoch), row("b", epoch)], [move("b", 0, "queued", epoch)])
    store.append_sessions("g", epoch, [], [move("a", 0, "failed", epoch, ended=True)])
    with pytest.raises(StoreError, match=r"a has ended; it can not become ready"):
        store.append_sessions("g", epoch, [], [move("b", 1, "ready", epoch), move("a", 1, "ready", epoch)])
    twice = [move("b", 1, "failed", epoch, ended=True), move("b", 2, "done", epoch, ended=True)]
    with pytest.raises(StoreError, match="b has ended"):
        store.append_sessions("g", epoch, [], twice)
    assert [line.state for line in store.session_log("b")] == ["queued"]
    with pytest.raises(StoreError, match="is not done in the log"):
        store.append_sessions("g", epoch, [], [replace(move("b", 0, "done", epoch))])


def test_a_gateway_that_was_replaced_writes_nothing_more(store: Store) -> None:
    store.add_tenant(ADA)
    first = store.begin_gateway("g")
    assert store.begin_gateway("other") == 1
    assert store.begin_gateway("g") == first + 1
    with pytest.raises(Superseded, match=f"epoch {first + 1} has started"):
        store.append_sessions("g", first, [row("a", first)], [])
    assert store.unended_sessions("g") == ()


def test_a_tenant_that_is_added_again_has_the_new_token_and_limits(store: Store) -> None:
    store.add_tenant(ADA)
    store.add_tenant(replace(ADA, token_hash="other", max_queue=1))
    assert store.tenants() == (replace(ADA, token_hash="other", max_queue=1),)
