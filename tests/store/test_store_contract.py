"""What every backend promises: the same tests on SQLite and PostgreSQL."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace

import pytest
from store_records import LOST, call, trajectory, verdict

from agentrl.errors import ConfigError, EvidenceError, StoreError
from agentrl.store import RunState, Store
from agentrl.types import (
    GraderSpec,
    Group,
    Limits,
    Observation,
    PolicyVersion,
    SandboxSpec,
    Split,
    Task,
    Termination,
    Turn,
    VersionSpan,
    to_json,
)


def version(number: int, *, step: int = 0, at: float = 0.0, parent: int | None = -1) -> PolicyVersion:
    return PolicyVersion(
        number=number,
        parent=(number - 1 if number else None) if parent == -1 else parent,
        step=step,
        location=f"file:///weights/{number}",
        content_hash="a" * 64,
        config_hash="b" * 64,
        published_at=at,
    )


# ----------------------------------------------------------------------------------------------------- runs


def test_a_run_keeps_what_it_was_begun_with_and_how_it_ended(store: Store) -> None:
    first = store.begin_run("one", config={"b": 1, "a": [1.5, None]}, algo="grpo", seed=-3)
    second = store.begin_run("two", config={}, algo="ppo", seed=2**40, parent=first.id)
    assert first.config == {"b": 1, "a": [1.5, None]}
    assert (first.seed, first.state, first.finished_at, first.trajectories) == (-3, RunState.RUNNING, None, 0)
    done = store.finish_run(first.id, "failed")
    assert done.state is RunState.FAILED
    assert done.finished_at is not None
    assert store.finish_run(first.id, RunState.FAILED) == done
    with pytest.raises(StoreError, match="is failed; it can not become finished"):
        store.finish_run(first.id)
    assert [run.id for run in store.runs()] == [second.id, first.id]
    assert store.lineage(second.id) == (second.id, first.id)


def test_an_unknown_run_is_an_error_that_names_the_nearest(store: Store) -> None:
    store.begin_run("x", config={}, algo="a", seed=0, run_id="warm-run")
    with pytest.raises(StoreError, match="Did you mean 'warm-run'"):
        store.run("warm-rnu")
    with pytest.raises(StoreError, match="Did you mean 'warm-run'"):
        store.add_trajectory("warm-rnu", trajectory())
    with pytest.raises(StoreError, match="no run 'gone'"):
        store.begin_run("y", config={}, algo="a", seed=0, parent="gone")
    with pytest.raises(StoreError, match="another run warm-run"):
        store.begin_run("z", config={}, algo="a", seed=0, run_id="warm-run")
    with pytest.raises(StoreError, match="not JSON"):
        store.begin_run("z", config={"x": math.nan}, algo="a", seed=0)


# ---------------------------------------------------------------------------------------------- trajectories


def test_adding_the_same_trajectory_twice_is_once(store: Store, run_id: str) -> None:
    record = trajectory("t1")
    assert store.add_trajectory(run_id, record, step=4)
    assert not store.add_trajectory(run_id, record, step=4)
    assert store.run(run_id).trajectories == 1
    assert store.trajectory("t1") == record


def test_other_content_under_a_known_id_is_refused(store: Store, run_id: str) -> None:
    record = trajectory("t1")
    store.add_trajectory(run_id, record)
    for other, phase in ((replace(record, index=1), "train"), (record, "heldout_before")):
        with pytest.raises(StoreError, match="t1 is stored with other content"):
            store.add_trajectory(run_id, other, phase=phase)
    elsewhere = store.begin_run("b", config={}, algo="a", seed=0).id
    with pytest.raises(StoreError, match=f"t1 belongs to run {run_id}"):
        store.add_trajectory(elsewhere, record)
    assert store.trajectory("t1") == record
    assert store.verify(run_id).ok


def test_a_light_row_says_what_the_trajectory_was(store: Store, run_id: str) -> None:
    store.add_trajectory(run_id, trajectory("t1"), phase="heldout_after", step=12)
    lost = trajectory(
        "t2",
        calls=(),
        earned=verdict(None, LOST),
        termination=Termination.FAULT,
        task_id="suite/two",
        group_id="g2",
        split=Split.HELDOUT,
    )
    store.add_trajectory(run_id, lost)
    one, two = store.trajectories(run_id)
    assert (one.id, one.run_id, one.seq, one.phase, one.step) == ("t1", run_id, 1, "heldout_after", 12)
    assert (one.task_id, one.group_id, one.split, one.termination) == ("suite/one", "g1", "train", "finished")
    assert (one.reward, one.fault_owner, one.fault_code) == (1.0, None, None)
    assert (one.turns, one.calls, one.tokens, one.min_version, one.max_version) == (1, 2, 3, 1, 2)
    assert (one.started_at, one.finished_at) == (100.5, 101.25)
    assert (two.reward, two.fault_owner, two.fault_code) == (None, "environment", "sandbox_lost")
    assert (two.calls, two.tokens, two.min_version, two.max_version, two.step) == (0, 0, None, None, None)
    assert store.trajectory_row("t2") == two


def test_trajectories_are_filtered_ordered_and_paged(store: Store, run_id: str) -> None:
    for at in range(6):
        record = trajectory(
            f"t{at}",
            group_id=f"g{at}",
            task_id=f"suite/{at % 2}",
            split=Split.HELDOUT if at == 5 else Split.TRAIN,
            termination=Termination.MAX_TURNS if at == 4 else Termination.FINISHED,
        )
        store.add_trajectory(run_id, record, phase="train" if at < 3 else "heldout_after", step=at // 2)

    def ids(**filters: object) -> list[str]:
        return [row.id for row in store.trajectories(run_id, **filters)]  # type: ignore[arg-type]

    assert ids() == ["t0", "t1", "t2", "t3", "t4", "t5"]
    assert ids(newest_first=True, limit=2) == ["t5", "t4"]
    assert ids(limit=2, offset=3) == ["t3", "t4"]
    assert ids(task="suite/1") == ["t1", "t3", "t5"]
    assert ids(phase="train", task="suite/0") == ["t0", "t2"]
    assert ids(split="heldout") == ["t5"]
    assert ids(termination=Termination.MAX_TURNS) == ["t4"]
    assert ids(step=1) == ["t2", "t3"]
    assert ids(group="g3") == ["t3"]
    assert [t.id for t in store.iter_trajectories(run_id, phase="heldout_after")] == ["t3", "t4", "t5"]
    assert len(store.trajectories()) == 6
    with pytest.raises(StoreError, match="Did you mean 'max_turns'"):
        ids(termination="maxturns")


def test_a_stream_longer_than_a_batch_keeps_the_order(store: Store, run_id: str) -> None:
    records = [trajectory(f"{at:03}", calls=(), group_id=f"g{at}") for at in range(70)]
    for group in range(0, 70, 35):
        for record in records[group : group + 35]:
            store.add_trajectory(run_id, record)
    assert list(store.iter_trajectories(run_id)) == records


def test_a_prefix_finds_the_only_id_that_begins_with_it(store: Store, run_id: str) -> None:
    for name in ("3f2a00", "3f2b00", "3F2A00", "a%b", "axb", "abc", "abcd"):
        store.add_trajectory(run_id, trajectory(name, group_id=name))
    assert store.resolve("3f2a") == "3f2a00"
    assert store.resolve("3F") == "3F2A00"
    assert store.resolve("a%") == "a%b"
    assert store.resolve("abc") == "abc"  # a whole id wins over longer ones
    with pytest.raises(StoreError, match=r"'3f2' begins 3f2a00, 3f2b00\. Give more"):
        store.resolve("3f2")
    with pytest.raises(StoreError, match="no trajectory begins with '3f3'"):
        store.resolve("3f3")
    with pytest.raises(StoreError, match="no trajectory begins with ''"):
        store.resolve("")
    with pytest.raises(StoreError, match="no trajectory '3f2'"):
        store.trajectory("3f2")


def test_a_group_is_added_whole_or_not_at_all_and_comes_back(store: Store, run_id: str) -> None:
    members = tuple(trajectory(f"m{at}", index=at) for at in range(3))
    group = Group(id="g1", task_id="suite/one", trajectories=members)
    store.add_trajectory(run_id, members[0])  # one came in alone, before the group closed
    assert store.add_group(run_id, group) == 2
    assert store.add_group(run_id, group) == 0
    assert store.group(run_id, "g1") == group
    clash = (trajectory("n0", index=0), replace(members[1], index=9))
    with pytest.raises(StoreError, match="m1 is stored with other content"):
        store.add_group(run_id, Group(id="g1", task_id="suite/one", trajectories=clash))
    assert store.run(run_id).trajectories == 3
    with pytest.raises(StoreError, match="group g1 is of task suite/one, not of suite/two"):
        store.add_trajectory(run_id, trajectory("other", task_id="suite/two"))
    with pytest.raises(StoreError, match="no group 'g9'"):
        store.group(run_id, "g9")


def test_counts_tell_terminations_faults_and_tools_apart(store: Store, run_id: str) -> None:
    store.add_trajectory(run_id, trajectory("t1"))
    store.add_trajectory(run_id, trajectory("t2", termination=Termination.MAX_TOKENS))
    lost = trajectory("t3", calls=(), earned=verdict(None, LOST), termination=Termination.FAULT)
    store.add_trajectory(run_id, lost, phase="heldout_before")
    counts = store.counts(run_id)
    assert counts.trajectories == 3
    assert counts.termination == {"finished": 1, "max_tokens": 1, "fault": 1}
    assert counts.fault == {"environment/sandbox_lost": 1}
    assert counts.tool == {"bash": 4}
    assert counts.tool_failed == {"bash": 2}  # the unusable action of each
    assert store.counts(run_id, phase="heldout_before").termination == {"fault": 1}


def test_null_log_probs_stay_null_and_are_never_a_number(store: Store, run_id: str) -> None:
    # LGP-06: the engine reported -0.1, -inf, nothing; the record holds null for both of the latter.
    made = call("a", (1,), (5, 6, 7), log_probs=(-0.1, None, None))
    store.add_trajectory(run_id, trajectory("t1", calls=(made,), turns=()))
    (again,) = store.trajectory("t1").calls
    assert again.generation_log_probs == (-0.1, None, None)
    assert [p is not None for p in again.generation_log_probs] == [True, False, False]
    assert b"[-0.1,null,null]" in to_json(again)


def test_a_reward_of_minus_zero_keeps_its_sign_and_verifies(store: Store, run_id: str) -> None:
    store.add_trajectory(run_id, trajectory("t1", earned=verdict(-0.0)))
    assert repr(store.trajectory("t1").verdict.reward) == "-0.0"
    assert store.verify(run_id).ok
    with pytest.raises(StoreError, match=r"started_at is -0\.0"):
        store.add_trajectory(run_id, trajectory("t2", started_at=-0.0))


def test_every_call_keeps_its_own_prompt(store: Store, run_id: str) -> None:
    # SRV-13: prompts of 3, 6, 9 ids, generations of 2; a second agent has its own root.
    first = call("a", (1, 2, 3), (4, 5))
    second = call("b", (1, 2, 3, 4, 5, 6), (7, 8), parent="a", keep=5)
    third = call("c", (1, 2, 3, 4, 5, 6, 7, 8, 9), (10, 11), parent="b", keep=8)
    sub_agent = call("d", (20, 21), (22,))
    store.add_trajectory(run_id, trajectory("t1", calls=(first, second, third, sub_agent), turns=()))
    again = store.trajectory("t1")
    assert [len(again.prompt_ids(c.id)) for c in again.calls] == [3, 6, 9, 2]
    assert again.prompt_ids("c") == (1, 2, 3, 4, 5, 6, 7, 8, 9)


def test_a_prompt_that_does_not_match_its_hash_is_refused_at_the_door(store: Store, run_id: str) -> None:
    wrong = replace(call("a", (1, 2), (3,)), prompt_hash="0" * 64)
    with pytest.raises(EvidenceError, match="call a: the prompt rebuilt"):
        store.add_trajectory(run_id, trajectory(calls=(wrong,), turns=()))
    assert store.run(run_id).trajectories == 0


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"score": math.nan}, "nan is not JSON"),
        ({"seen": {"a set"}}, "a set is not JSON"),
        ({"inner": {1: "x"}}, "key 1 is not a string"),
    ],
)
def test_what_json_would_change_in_silence_is_refused(
    store: Store, run_id: str, data: dict[str, object], says: str
) -> None:
    record = trajectory()
    seen = Observation(action_id="x", text="", data=data)
    turn = Turn(call_id="a", actions=record.turns[0].actions, observations=(seen,))
    with pytest.raises(StoreError, match=f"turn 0, data of observation x: {says}"):
        store.add_trajectory(run_id, replace(record, turns=(turn,)))


def test_a_nul_in_a_name_and_an_odd_phase_are_refused(store: Store, run_id: str) -> None:
    with pytest.raises(StoreError, match="harness holds a NUL"):
        store.add_trajectory(run_id, trajectory(harness="a\0b"))
    with pytest.raises(StoreError, match="phase 'Held Out'"):
        store.add_trajectory(run_id, trajectory(), phase="Held Out")


def test_threads_of_one_store_and_of_another_on_the_same_database_lose_nothing(
    store: Store, url: str
) -> None:
    run = store.begin_run("many", config={}, algo="a", seed=0).id
    errors: list[BaseException] = []

    def write(which: Store, worker: int) -> None:
        try:
            for at in range(6):
                which.add_trajectory(run, trajectory(f"{worker}-{at}", group_id=f"{worker}"))
        except BaseException as error:
            errors.append(error)

    with Store.open(url) as other:
        threads = [threading.Thread(target=write, args=((store, other)[w % 2], w)) for w in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert errors == []
    report = store.verify(run)
    assert (report.trajectories, report.why) == (36, None)


# -------------------------------------------------------------------------------------------------- training


def test_versions_follow_each_other_without_gaps(store: Store, run_id: str) -> None:
    with pytest.raises(StoreError, match="the next is number 0"):
        store.publish(run_id, version(1))
    assert store.publish(run_id, version(0))
    assert not store.publish(run_id, version(0))
    with pytest.raises(StoreError, match=r"version 0 of run .* exists with other content"):
        store.publish(run_id, version(0, at=5.0))
    with pytest.raises(StoreError, match="the next is number 1"):
        store.publish(run_id, version(2))
    store.publish(run_id, version(1))
    assert store.policy_versions(run_id) == (version(0), version(1))
    assert store.latest_version(run_id) == version(1)


def test_a_run_that_resumes_another_goes_on_from_one_of_its_versions(store: Store, run_id: str) -> None:
    for number in range(3):
        store.publish(run_id, version(number))
    child = store.begin_run("resumed", config={}, algo="a", seed=0, parent=run_id).id
    assert store.latest_version(child) == version(2)
    with pytest.raises(StoreError, match="child of one of the versions 0 to 2"):
        store.publish(child, version(4))
    with pytest.raises(StoreError, match="child of one of the versions 0 to 2"):
        store.publish(child, version(0))
    store.publish(child, version(2))  # resumed from the checkpoint of version 1
    assert store.latest_version(child) == version(2)
    assert store.verify(child).ok


def test_an_update_marks_publishes_and_measures_in_one_step(store: Store, run_id: str) -> None:
    for name in ("a", "b", "c"):
        store.add_trajectory(run_id, trajectory(name))
    store.publish(run_id, version(0))
    assert store.record_update(run_id, 1, ["b", "a"], version(1, step=1), {"loss": 0.5, "bad": math.nan})
    assert [row.id for row in store.unconsumed(run_id)] == ["c"]
    assert store.latest_version(run_id) == version(1, step=1)
    (update,) = store.updates(run_id)
    assert (update.step, update.trained_version, update.published, update.trajectories) == (1, 0, 1, 2)
    bad, loss = store.metrics(run_id)
    assert (loss.name, loss.step, loss.value) == ("loss", 1, 0.5)
    assert math.isnan(bad.value)
    assert store.verify(run_id).updates == 1


def test_the_same_update_again_is_once_and_another_under_its_step_is_refused(
    store: Store, run_id: str
) -> None:
    for name in ("a", "b"):
        store.add_trajectory(run_id, trajectory(name))
    store.publish(run_id, version(0))
    store.record_update(run_id, 1, ["a"], version(1), {})
    assert not store.record_update(run_id, 1, ["a"], version(1), {})
    for ids, published in ((["b"], version(1)), (["a"], None), (["a"], version(1, at=9.0))):
        with pytest.raises(StoreError, match=r"update 1 of run .* is recorded with other"):
            store.record_update(run_id, 1, ids, published, {})


@pytest.mark.parametrize(
    ("ids", "step", "says"),
    [
        (["a", "b"], 2, "trajectory a was consumed by update 1"),
        (["b", "nowhere"], 2, "trajectory nowhere is not in the store"),
        (["b", "b"], 2, "trajectory b is given twice"),
        (["b"], 0, "update 0 of run .* comes after update 1"),
    ],
)
def test_a_refused_update_leaves_nothing_behind(
    store: Store, run_id: str, ids: list[str], step: int, says: str
) -> None:
    for name in ("a", "b"):
        store.add_trajectory(run_id, trajectory(name))
    store.publish(run_id, version(0))
    store.record_update(run_id, 1, ["a"], version(1), {"loss": 1.0})
    with pytest.raises(StoreError, match=says):
        store.record_update(run_id, step, ids, version(2), {"loss": 2.0})
    assert [row.id for row in store.unconsumed(run_id)] == ["b"]
    assert store.latest_version(run_id) == version(1)
    assert [m.value for m in store.metrics(run_id, ["loss"])] == [1.0]
    with pytest.raises(StoreError, match="the next is number 2"):
        store.record_update(run_id, 2, ["b"], version(5), {"loss": 2.0})
    assert [row.id for row in store.unconsumed(run_id)] == ["b"]
    assert store.verify(run_id).ok


def test_a_resumed_run_trains_what_is_left_and_nothing_twice(store: Store, run_id: str) -> None:
    for name in ("a", "b", "c"):
        store.add_trajectory(run_id, trajectory(name))
    store.add_trajectory(run_id, trajectory("demo"), phase="demonstration")
    store.record_update(run_id, 1, ["a"], None, {})
    child = store.begin_run("resumed", config={}, algo="a", seed=0, parent=run_id).id
    store.add_trajectory(child, trajectory("d"))
    assert [row.id for row in store.unconsumed(child)] == ["b", "c", "d"]
    with pytest.raises(StoreError, match=f"a was consumed by update 1 of run {run_id}"):
        store.record_update(child, 2, ["a"], None, {})
    store.record_update(child, 2, ["b", "d"], None, {})
    assert [row.id for row in store.unconsumed(child)] == ["c"]
    stranger = store.begin_run("another study", config={}, algo="a", seed=0).id
    assert store.record_update(stranger, 1, ["a"], None, {})  # once per lineage, not once per store


def test_staleness_is_told_at_training_time_and_per_token(store: Store, run_id: str) -> None:
    # ASY-08: submitted at 5, tokens of 5 and 6, finished while 6 was newest, trained at 8.
    store.publish(run_id, version(0, at=0.0))
    for number in range(1, 9):
        store.publish(run_id, version(number, at=10.0 * number))
    spans = (VersionSpan(version=5, start=0, end=1), VersionSpan(version=6, start=1, end=2))
    made = call("a", (1,), (2, 3), versions=spans)
    record = trajectory("t", calls=(made,), turns=(), started_at=55.0, finished_at=65.0)
    unknown = trajectory("u", calls=(), started_at=-1.0, finished_at=65.0)
    store.add_trajectory(run_id, record)
    store.add_trajectory(run_id, unknown)
    store.record_update(run_id, 9, ["t", "u"], version(9, at=90.0), {})
    one, two = store.staleness(run_id)
    assert (one.trained_version, one.submit, one.oldest_token, one.newest_token, one.queue) == (8, 3, 3, 2, 2)
    assert (two.submit, two.oldest_token, two.newest_token, two.queue) == (None, None, None, 2)
    assert store.staleness(run_id, step=3) == ()


def test_metrics_come_back_by_name_and_step_and_a_second_value_replaces_the_first(
    store: Store, run_id: str
) -> None:
    store.log(run_id, [(2, "loss", 0.25), (1, "loss", 0.5), (1, "grad", math.inf), (1, "loss", 0.75)])
    store.log(run_id, [(2, "loss", 0.125)])
    store.log(run_id, [])
    seen = [(m.name, m.step, m.value) for m in store.metrics(run_id)]
    assert seen == [("grad", 1, math.inf), ("loss", 1, 0.75), ("loss", 2, 0.125)]
    assert [m.name for m in store.metrics(run_id, ["grad"])] == ["grad"]


# --------------------------------------------------------------------------------------------- bookkeeping


def test_events_tasks_and_admissions_are_kept(store: Store, run_id: str) -> None:
    store.note(run_id, "phase", "training begins", {"step": 0})
    store.note(run_id, "fault", "a sandbox went away")
    assert [(e.kind, e.message, e.data) for e in store.events(run_id)] == [
        ("phase", "training begins", {"step": 0}),
        ("fault", "a sandbox went away", {}),
    ]
    assert [e.kind for e in store.events(run_id, kind="fault")] == ["fault"]

    task = Task(
        id="suite/one",
        revision="1" * 64,
        path="/here",
        instruction="fix \0 it",
        sandbox=SandboxSpec(image="base"),
        tools=("bash",),
        grader=GraderSpec(kind="tests"),
        limits=Limits(),
        metadata={"deep": [1, {"x": 0.1}]},
    )
    assert store.add_task(task)
    assert not store.add_task(replace(task, path="/elsewhere"))
    assert store.task("suite/one") == task
    newer = replace(task, revision="2" * 64)
    store.add_task(newer)
    assert store.task("suite/one") == newer
    assert store.task("suite/one", "1" * 64) == task
    with pytest.raises(StoreError, match="stored with other content"):
        store.add_task(replace(task, instruction="break it"))
    with pytest.raises(StoreError, match="Did you mean 'suite/one'"):
        store.task("suite/on")

    assert store.admission("suite/one", "1" * 64) is None
    store.add_admission("suite/one", "1" * 64, valid=False, facts={"gold": "fails"})
    store.add_admission("suite/one", "1" * 64, valid=True, facts={"repeats": 3})
    admission = store.admission("suite/one", "1" * 64)
    assert admission is not None
    assert (admission.valid, admission.facts) == (True, {"repeats": 3})


# ----------------------------------------------------------------------------------------------------- work


def test_work_is_handed_out_once_in_order_and_completed_once(store: Store, run_id: str) -> None:
    assert store.enqueue(run_id, "prompt", {"p1": {"task": "a"}, "p2": {"task": "b"}}) == 2
    assert store.enqueue(run_id, "prompt", {"p2": {"task": "b"}, "p3": {"task": "c"}}) == 1
    first = store.claim(run_id, "prompt", lease_s=60, owner="w1")
    second = store.claim(run_id, "prompt", lease_s=60, owner="w2")
    assert first is not None
    assert second is not None
    assert (first.key, first.payload, first.epoch) == ("p1", {"task": "a"}, 1)
    assert second.key == "p2"
    assert store.claim(run_id, "other", lease_s=60, owner="w1") is None
    store.complete(first, {"trajectory": "t"})
    with pytest.raises(StoreError, match=r"w1 no longer holds prompt p1 .*is done"):
        store.complete(first)
    assert store.work(run_id, "prompt") == {"done": 1, "leased": 1, "queued": 1}


def test_an_ended_lease_is_taken_over_and_the_late_owner_is_refused(store: Store, run_id: str) -> None:
    store.enqueue(run_id, "group", {"g": {}})
    late = store.claim(run_id, "group", lease_s=1.0, owner="slow")
    assert late is not None
    assert store.claim(run_id, "group", lease_s=60, owner="quick") is None
    time.sleep(max(0.0, late.lease_until - time.time()) + 0.05)
    taken = store.claim(run_id, "group", lease_s=60, owner="quick")
    assert taken is not None
    assert taken.epoch == 2
    with pytest.raises(StoreError, match=r"slow no longer holds group g .*owner quick, claim 2"):
        store.complete(late)
    with pytest.raises(StoreError, match="slow no longer holds"):
        store.renew(late, lease_s=5)
    store.complete(taken)


def test_a_renewed_lease_holds_and_expire_puts_back_only_ended_ones(store: Store, run_id: str) -> None:
    store.enqueue(run_id, "group", {"g1": {}, "g2": {}})
    kept = store.claim(run_id, "group", lease_s=0.05, owner="w")
    lost = store.claim(run_id, "group", lease_s=0.05, owner="w")
    assert kept is not None
    assert lost is not None
    assert store.renew(kept, lease_s=60) > kept.lease_until
    time.sleep(0.1)
    assert store.expire(run_id) == 1
    assert store.expire(run_id, "group") == 0
    assert store.work(run_id, "group") == {"leased": 1, "queued": 1}
    with pytest.raises(StoreError, match="it is queued"):
        store.complete(lost)
    store.complete(kept)


def test_many_claimers_get_each_piece_of_work_exactly_once(store: Store, run_id: str) -> None:
    keys = {f"k{at:02}" for at in range(30)}
    store.enqueue(run_id, "prompt", {key: {} for key in keys})
    got: list[str] = []

    def work(owner: str) -> None:
        for _ in range(200):
            held = store.claim(run_id, "prompt", lease_s=60, owner=owner)
            if held is None and store.work(run_id, "prompt").get("queued", 0) == 0:
                return
            if held is not None:
                got.append(held.key)
                store.complete(held)

    threads = [threading.Thread(target=work, args=(f"w{at}",)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(got) == sorted(keys)
    assert store.work(run_id, "prompt") == {"done": 30}


# ------------------------------------------------------------------------------------------------------ urls


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite://", "in memory can not be shared"),
        ("mysql://host/x", "No store on mysql"),
        ("://", "not a database URL"),
    ],
)
def test_a_url_that_is_no_store_is_a_configuration_error(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Store.open(url)


def test_the_password_is_never_shown() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError) as refused:
        Store.open("postgresql://me:secret@127.0.0.1:1/none", wait_s=0.2)
    assert "secret" not in str(refused.value)
