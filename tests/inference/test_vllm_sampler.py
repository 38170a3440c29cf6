"""The vLLM sampler against servers on loopback whose every log-prob can be recomputed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fake_vllm import STOP, Answer, FakeVllm, broken, garbage, half, log_probs, status, write_weights

from agentrl.errors import ConfigError, ModelError
from agentrl.inference.sampler import Sampler, SampleRequest, SampleResult
from agentrl.inference.states import EngineState
from agentrl.inference.vllm import LOAD_SLACK, MAX_LOST, Probe, VllmSampler, group_of
from agentrl.types import FinishReason, LogProbKind, SamplingParams

T = TypeVar("T")
GENERATE = "/inference/v1/generate"


def run(work: Callable[..., Awaitable[T]], servers: int | list[FakeVllm] = 1, **options: Any) -> T:
    """Run `work(sampler, *servers)`; afterwards nothing is in flight anywhere."""

    async def whole() -> T:
        made = [FakeVllm() for _ in range(servers)] if isinstance(servers, int) else servers
        for server in made:
            await server.start()
        sampler = await VllmSampler.connect([s.url for s in made], deadline_s=20, **options)
        try:
            async with asyncio.timeout(60):
                return await work(sampler, *made)
        finally:
            await sampler.close()
            assert sampler.active == 0
            for server in made:
                await server.stop()

    return asyncio.run(whole())


async def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not condition() and time.monotonic() < ends:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    assert condition()


def request(
    prompt: tuple[int, ...] = (3, 4, 5),
    *,
    id: str = "g.0.1.c0",
    deadline_s: float = 30.0,
    **params: Any,
) -> SampleRequest:
    return SampleRequest(
        id=id,
        session=id.rpartition(".")[0],
        prompt_token_ids=prompt,
        params=SamplingParams(**{"max_tokens": 12, "stop_token_ids": (STOP,), **params}),
        deadline_s=deadline_s,
    )


def check(result: SampleResult, weights: dict[int | None, int], *, temperature: float = 1.0) -> None:
    """Every log-prob is that of its token after its whole prefix under the weights of its version."""
    assert result.log_probs is not None
    ids = list(result.prompt_token_ids)
    ends = [0, *(span.end for span in result.policy_versions)]
    assert [span.start for span in result.policy_versions] == ends[:-1]
    assert ends[-1] in (len(result.token_ids), 0)
    versions: list[int | None] = [s.version for s in result.policy_versions for _ in range(s.end - s.start)]
    for token, known, version in zip(
        result.token_ids, result.log_probs, versions or [None] * len(result.token_ids), strict=True
    ):
        assert known == pytest.approx(log_probs(weights[version], ids, temperature=temperature)[token])
        ids.append(token)


# --------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_ids_log_probs_and_echo_are_those_of_the_server(temperature: float) -> None:
    """LGP-01: at T = 0.7 the log-prob is log_softmax(z / 0.7), and says that it is processed."""

    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        assert isinstance(sampler, Sampler)
        assert (sampler.model, sampler.policy_version, sampler.max_context) == ("fake", None, 256)
        result = await sampler.sample(request(temperature=temperature))
        check(result, {None: 0}, temperature=temperature or 1.0)
        assert result.prompt_token_ids == (3, 4, 5)
        assert result.policy_versions == ()
        greedy = temperature == 0
        assert result.log_prob_kind is (LogProbKind.RAW if greedy else LogProbKind.PROCESSED)
        assert result.finish_reason is (
            FinishReason.STOP if result.token_ids[-1] == STOP else FinishReason.LENGTH
        )

    run(work)


@pytest.mark.parametrize("processed", [True, False])
def test_what_a_servers_log_probs_are_of_is_measured_at_the_start(processed: bool) -> None:
    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        assert sampler.log_prob_kind is (LogProbKind.PROCESSED if processed else LogProbKind.RAW)
        result = await sampler.sample(request(temperature=0.5))
        check(result, {None: 0}, temperature=0.5 if processed else 1.0)
        assert result.log_prob_kind is sampler.log_prob_kind

    run(work, [FakeVllm(processed=processed)])


def test_many_requests_at_once_get_their_own_answers() -> None:
    async def work(sampler: VllmSampler, *servers: FakeVllm) -> None:
        asked = [request((2, 3, i % 37), id=f"g{i % 7}.{i}.1.c0") for i in range(60)]
        for one, result in zip(asked, await asyncio.gather(*map(sampler.sample, asked)), strict=True):
            assert result.request_id == one.id
            assert result.prompt_token_ids == one.prompt_token_ids
            check(result, {None: 0})
        assert sampler.counts.finished == sampler.counts.requests == sampler.counts.tries == 60

    run(work, 3)


@pytest.mark.parametrize("fault", [broken, half, garbage, status(500), status(503), status(429), status(502)])
def test_a_lost_try_is_repeated_and_counted_once(fault: Any) -> None:
    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        server.faults[GENERATE].append(fault)
        result = await sampler.sample(request())
        check(result, {None: 0})
        counts = sampler.counts
        assert (counts.tries, counts.requests, counts.finished) == (2, 1, 1)
        assert counts.generated_tokens == len(result.token_ids)
        bodies = [b for b in server.sent(GENERATE) if "request_id" in b]
        assert len({b["request_id"] for b in bodies}) == 2, "a server may refuse an id that it knows"

    run(work)


def test_a_connection_that_the_server_closed_while_idle_is_no_lost_replica(tmp_path: Path) -> None:
    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        server.closes_idle = True  # one connection is kept from the greeting
        results = [await sampler.sample(request(id=f"g.0.1.c{i}")) for i in range(3)]
        await sampler.publish(write_weights(tmp_path / "1", 11), 1)
        results.append(await sampler.sample(request(id="g.0.1.c3")))
        for result in results:
            check(result, {None: 0, 1: 11})
        assert results[-1].policy_versions[0].version == 1
        counts = sampler.counts
        assert (counts.finished, counts.failed, counts.pauses, counts.resumes) == (4, 0, 1, 1)
        assert counts.closed_idle == server.closed_idle > 0
        sent = server.sent(GENERATE)[2:]  # without the two of the greeting
        assert len({b["request_id"] for b in sent}) == len(sent) == 4, "what was read was asked once"
        assert sampler.replicas[0].up

    run(work)


def test_a_server_that_dies_of_a_request_is_lost_though_its_connection_was_kept() -> None:
    async def dies(server: FakeVllm) -> None:
        server._server.close()  # type: ignore[union-attr]  # it takes no connection any more
        server.closes_idle = True

    async def work(sampler: VllmSampler, first: FakeVllm, second: FakeVllm) -> None:
        sampler._homes["g.0.1"] = sampler.replicas[0]
        await dies(first)
        check(await sampler.sample(request()), {None: 0})
        counts = sampler.counts
        assert (counts.tries, counts.closed_idle, len(second.sent(GENERATE))) == (3, 1, 3)
        assert not sampler.replicas[0].up

    run(work, 2)


def test_an_answer_that_began_on_a_kept_connection_is_a_lost_try() -> None:
    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        for beginning in (b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\ncontent-le", b"HTTP/1.1 200 OK\r\n\r\n{"):
            server.faults[GENERATE].append(lambda _, raw=beginning: Answer(raw=raw))  # type: ignore[misc]
            check(await sampler.sample(request()), {None: 0})
        assert (sampler.counts.tries, sampler.counts.closed_idle, sampler.counts.finished) == (6, 0, 3)

    run(work)


def test_a_request_that_keeps_ending_servers_is_given_up() -> None:
    async def work(sampler: VllmSampler, *servers: FakeVllm) -> None:
        for server in servers:
            server.faults[GENERATE].extend([broken] * 10)
        with pytest.raises(ModelError, match="tries came to nothing") as caught:
            await sampler.sample(request())
        assert caught.value.code == "server"
        assert caught.value.retryable
        assert sampler.counts.tries == MAX_LOST + 1, "a kept connection that ends is looked at twice, once"
        for server in servers:
            server.faults[GENERATE].clear()
        check(await sampler.sample(request()), {None: 0})

    run(work, 2)


@pytest.mark.parametrize(
    ("code", "made"),
    [
        ("refused", request((3, 99))),
        ("empty_prompt", request(())),
        ("context", request((3,) * 256)),
        ("seed", request(seed=1)),
    ],
)
def test_a_request_that_would_fail_again_is_refused_without_a_retry(code: str, made: SampleRequest) -> None:
    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        with pytest.raises(ModelError) as caught:
            await sampler.sample(made)
        assert caught.value.code == code
        assert not caught.value.retryable
        assert sampler.counts.tries <= 1

    run(work)


def test_seeds_are_sent_to_servers_that_can_take_them() -> None:
    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        await sampler.sample(request(seed=11))
        assert server.sent(GENERATE)[-1]["sampling_params"]["seed"] == 11

    run(work, seeds=True)


def test_a_deadline_says_what_was_waited_for_and_why() -> None:
    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        server.step_s = 5.0
        with pytest.raises(ModelError, match=r"waiting for fake since 0\.2 s: http.* up") as caught:
            await sampler.sample(request(deadline_s=0.2))
        assert caught.value.code == "deadline"
        await server.stop()
        with pytest.raises(ModelError, match=r"down \(NotConnected"):
            await sampler.sample(request(deadline_s=1.5))

    run(work)


def test_cancelling_a_task_ends_the_generation_in_the_server() -> None:
    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        server.step_s = 0.5
        tasks = [asyncio.create_task(sampler.sample(request(id=f"g.{i}.1.c0"))) for i in range(4)]
        await until(lambda: len(server.running) == 4)
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(x, asyncio.CancelledError)
            for x in await asyncio.gather(*tasks, return_exceptions=True)
        )
        await until(lambda: not server.running)
        assert server.disconnected == 4
        assert sampler.counts.cancelled == 4

    run(work)


def test_closing_ends_what_waits_with_a_named_cause() -> None:
    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        server.step_s = 5.0
        task = asyncio.create_task(sampler.sample(request()))
        await until(lambda: bool(server.running))
        await sampler.close()
        with pytest.raises(ModelError) as caught:
            await task
        assert caught.value.code == "closed"
        with pytest.raises(ModelError, match="is closed"):
            await sampler.sample(request())

    run(work)


def test_an_answer_that_is_no_evidence_fails_at_the_first_call() -> None:
    """SRV-04: one call was made, not 816."""

    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        async def nothing(body: dict[str, Any]) -> None: ...

        def strip(body: dict[str, Any]) -> None:
            body["return_token_ids"] = False

        server.faults[GENERATE].append(strip)
        with pytest.raises(ModelError) as caught:
            await sampler.sample(request())
        assert caught.value.code == "no_echo"
        assert sampler.counts.tries == 1

    run(work)


# --------------------------------------------------------------------------------------------------- replicas


def test_sessions_are_named_by_group_member_and_try() -> None:
    assert group_of("run-g00001.3.1") == "run-g00001"
    assert group_of("a.b.3.1") == "a.b"
    assert [group_of(x) for x in ("free", "a.b", "a.b.c")] == ["free", "a.b", "a.b.c"]


def test_a_session_and_its_group_stay_with_the_replica_that_knows_their_prefix() -> None:
    async def work(sampler: VllmSampler, *servers: FakeVllm) -> None:
        for turn in range(3):
            await asyncio.gather(
                *(
                    sampler.sample(request(id=f"g{group}.{member}.1.c{turn}"))
                    for group in range(6)
                    for member in range(4)
                )
            )
        where: dict[str, set[int]] = {}
        for number, server in enumerate(servers):
            for body in server.sent(GENERATE):
                if "request_id" in body:
                    where.setdefault(body["request_id"].split(".")[0], set()).add(number)
        assert len(where) == 6
        assert all(len(homes) == 1 for homes in where.values()), where
        assert len(set.union(*where.values())) == 3, "and the groups are spread"

    run(work, 3)


def test_a_replica_with_much_more_to_do_gives_up_its_sessions() -> None:
    async def work(sampler: VllmSampler, *servers: FakeVllm) -> None:
        for server in servers:
            server.step_s = 0.3
        tasks = [
            asyncio.create_task(sampler.sample(request(id=f"g.{i}.1.c0", max_tokens=2))) for i in range(30)
        ]
        await until(lambda: sum(len(s.running) for s in servers) == 30)
        loads = sorted(len(s.running) for s in servers)
        assert loads[1] - loads[0] <= LOAD_SLACK + 1
        assert loads[0] > 0
        await asyncio.gather(*tasks)

    run(work, 2)


def test_a_replica_that_dies_is_left_and_taken_back_when_it_answers() -> None:
    async def work(sampler: VllmSampler, one: FakeVllm, two: FakeVllm) -> None:
        one.step_s = two.step_s = 0.01
        tasks = [asyncio.create_task(sampler.sample(request(id=f"g{i}.0.1.c0"))) for i in range(8)]
        await until(lambda: bool(one.running) and bool(two.running))
        await one.stop()
        for result in await asyncio.gather(*tasks):
            check(result, {None: 0})
        assert sampler.counts.finished == 8
        await one.start()
        await until(lambda: all(r.up for r in sampler.replicas))

    run(work, 2)


def test_servers_are_waited_for_by_name_and_different_models_refused() -> None:
    async def nobody() -> None:
        server = await FakeVllm().start()
        await server.stop()
        with pytest.raises(ModelError, match=r"waiting for http://127.* since 1\.5 s: NotConnected"):
            await VllmSampler.connect([server.url], deadline_s=1.5)

    asyncio.run(nobody())

    async def two() -> None:
        servers = [await FakeVllm(model=name).start() for name in ("a", "b")]
        try:
            with pytest.raises(ConfigError, match="different models: a, b"):
                await VllmSampler.connect([s.url for s in servers])
        finally:
            for server in servers:
                await server.stop()

    asyncio.run(two())


@pytest.mark.parametrize(
    ("path", "fault", "said"),
    [
        (GENERATE, status(403, "Scale-out endpoints are disabled."), "--enable-scale-out"),
        ("/v1/models", status(401, "no key"), "AGENTRL_SERVER_KEY"),
        ("/v1/models", lambda _: Answer(body={"object": "list"}), "as vLLM does"),
    ],
)
def test_a_server_that_can_never_work_is_a_configuration_error(path: str, fault: Any, said: str) -> None:
    async def whole() -> None:
        server = await FakeVllm().start()
        server.faults[path].append(fault)
        try:
            with pytest.raises(ConfigError, match=said):
                await VllmSampler.connect([server.url], deadline_s=10)
        finally:
            await server.stop()

    asyncio.run(whole())


# ---------------------------------------------------------------------------------------------------- weights


async def flying(sampler: VllmSampler, server: FakeVllm, count: int = 16) -> list[asyncio.Task[SampleResult]]:
    """Requests of which each has some tokens."""
    server.step_s = 0.004
    tasks = [
        asyncio.create_task(
            sampler.sample(request((7, i), id=f"g.{i}.1.c0", max_tokens=60, stop_token_ids=()))
        )
        for i in range(count)
    ]
    await until(lambda: len(server.running) == count and all(len(r.ids) > 3 for r in server.running))
    return tasks


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_requests_in_flight_go_on_under_the_new_weights_with_a_version_per_token(
    mode: Any, tmp_path: Path
) -> None:
    """ASY-04: sixteen running requests, none is lost; every token is vouched for by the weights it names."""

    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        await sampler.publish(write_weights(tmp_path / "v0", 10), 0, content_hash="aa")
        tasks = await flying(sampler, server)
        await sampler.publish(write_weights(tmp_path / "v1", 11), 1, content_hash="bb", in_flight=mode)
        results = await asyncio.gather(*tasks)
        for result in results:
            check(result, {0: 10, 1: 11})
            assert [s.version for s in result.policy_versions] == [0, 1]
            assert len(result.token_ids) == 60
            assert result.finish_reason is FinishReason.LENGTH
        assert sampler.counts.tries == (16 if mode == "keep" else 32)
        assert sampler.counts.generated_tokens == 16 * 60
        assert sampler.counts.prompt_tokens == 16 * 2, "prefixes of resumed requests are not prompts"
        assert sampler.policy_version == 1
        fresh = await sampler.sample(request())
        assert [s.version for s in fresh.policy_versions] == [1]
        assert server.sent(GENERATE)[-1]["cache_salt"] == "1.bb"

    run(work)


def test_a_resumed_generation_asks_only_for_what_is_left(tmp_path: Path) -> None:
    """SRV-09: max_new 60 and n sampled: the second request is for 60 - n after prompt + n."""

    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        await sampler.publish(write_weights(tmp_path / "v0", 10), 0)
        tasks = await flying(sampler, server, 1)
        await sampler.publish(write_weights(tmp_path / "v1", 11), 1, in_flight="abort")
        (result,) = await asyncio.gather(*tasks)
        second = server.sent(GENERATE)[-1]
        had = len(second["token_ids"]) - 2
        assert had > 3
        assert second["token_ids"] == [7, 0, *result.token_ids[:had]]
        assert second["sampling_params"]["max_tokens"] == 60 - had

    run(work)


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("check", None),
        ("/pause", status(500)),
        ("load", status(500)),
        ("/update_weight_version", status(500)),
    ],
)
def test_a_publication_that_fails_leaves_old_weights_running_engines_and_the_old_version(
    where: str, fault: Any, tmp_path: Path
) -> None:
    """ASY-07: pauses equal resumes after every update, also one that failed on one of two servers."""

    async def work(sampler: VllmSampler, one: FakeVllm, two: FakeVllm) -> None:
        await sampler.publish(write_weights(tmp_path / "v0", 10), 0)
        tasks = await flying(sampler, two, 0) or await flying(sampler, one, 0)
        bad = write_weights(tmp_path / "v1", "cut short" if where == "check" else 11)
        if where == "load":
            two.faults["/collective_rpc"].extend([lambda _: None, fault])
        elif fault is not None:
            two.faults[where].append(fault)
        with pytest.raises(ModelError) as caught:
            await sampler.publish(bad, 1)
        assert caught.value.code == "update"
        assert sampler.policy_version == 0
        assert sampler.state is EngineState.RUNNING
        for server in (one, two):
            assert (server.weights, server.label, server.paused) == (10, "0", None)
        assert sampler.counts.pauses == sampler.counts.resumes
        for i in range(6):
            result = await sampler.sample(request(id=f"h{i}.0.1.c0"))
            check(result, {0: 10})
        assert not tasks
        await sampler.publish(write_weights(tmp_path / "v1b", 11), 1)
        for server in (one, two):
            assert (server.weights, server.label, server.paused) == (11, "1", None)

    run(work, 2)


def test_three_publications_are_three_pauses_three_resumes_and_versions_in_order(tmp_path: Path) -> None:
    """ASY-07."""

    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        for number in (1, 2, 3):
            await sampler.publish(write_weights(tmp_path / f"v{number}", number), number)
            assert sampler.policy_version == number
        counts = sampler.counts
        assert (counts.pauses, counts.resumes, counts.updates) == (3, 3, 3)
        with pytest.raises(ModelError, match="not above"):
            await sampler.publish(write_weights(tmp_path / "v3", 3), 3)

    run(work)


def test_pause_and_resume_are_paired_and_a_publication_keeps_a_pause(tmp_path: Path) -> None:
    """ASY-06: what is not in the state machine is refused, and the servers live."""

    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        with pytest.raises(ModelError, match="can not become running"):
            await sampler.resume()
        await sampler.pause()
        with pytest.raises(ModelError, match="can not become paused"):
            await sampler.pause()
        waiting = asyncio.create_task(sampler.sample(request()))
        await until(lambda: bool(server.running))
        await sampler.publish(write_weights(tmp_path / "v0", 10), 0)
        assert server.paused == "keep"
        assert sampler.state is EngineState.PAUSED
        assert not waiting.done()
        await sampler.resume()
        check(await waiting, {0: 10})

    run(work)


def test_weights_that_score_the_probe_otherwise_are_taken_back(tmp_path: Path) -> None:
    """The sync gate: what the learner computes and what the server says must agree before tokens count."""

    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        ids = (3, 9, 4, 4)

        def probe(weights: int) -> Probe:
            known = [log_probs(weights, ids[:i])[ids[i]] for i in range(1, 4)]
            return Probe(ids=ids, log_probs=(None, *known), tolerance=1e-6)

        await sampler.publish(write_weights(tmp_path / "v0", 10), 0, probe=probe(10))
        tasks = await flying(sampler, server, 4)
        with pytest.raises(ModelError, match="is off the learner by") as caught:
            await sampler.publish(write_weights(tmp_path / "v1", 12), 1, probe=probe(11))
        assert caught.value.code == "sync"
        assert (server.weights, server.label, server.paused) == (10, "0", None)
        for result in await asyncio.gather(*tasks):
            check(result, {0: 10})
        assert sampler.policy_version == 0
        assert sampler.counts.pauses == sampler.counts.resumes
        assert (await sampler.score(ids))[1:] == pytest.approx(probe(10).log_probs[1:])

    run(work)


def test_what_ends_while_weights_are_judged_waits_and_is_not_thrown_away(tmp_path: Path) -> None:
    """Between the load and the verdict of the probe, tokens of the new weights are neither good nor
    foreign."""

    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        ids = (3, 9)
        known = (None, log_probs(11, (3,))[9])
        await sampler.publish(write_weights(tmp_path / "v0", 10), 0)
        tasks = await flying(sampler, server)

        async def finish_first(body: dict[str, Any]) -> None:
            server.step_s = 0.0
            while server.running:  # noqa: ASYNC110
                await asyncio.sleep(0.002)

        server.faults["/v1/completions"].append(finish_first)
        await sampler.publish(
            write_weights(tmp_path / "v1", 11), 1, probe=Probe(ids=ids, log_probs=known, tolerance=1e-6)
        )
        for result in await asyncio.gather(*tasks):
            check(result, {0: 10, 1: 11})
        assert sampler.counts.tries == 16

    run(work)


def test_tokens_of_a_server_that_lost_the_weights_are_thrown_away(tmp_path: Path) -> None:
    """A restarted server has the weights it was started with: nothing it says counts until it has ours."""

    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        await sampler.publish(write_weights(tmp_path / "v0", 10), 0)
        server.weights, server.label = 0, "default"  # behind the sampler's back
        result = await sampler.sample(request())
        check(result, {0: 10})
        assert [s.version for s in result.policy_versions] == [0]
        assert sampler.counts.tries == 2
        assert sampler.counts.generated_tokens == len(result.token_ids)
        await server.crash_and_come_back()
        check(await sampler.sample(request()), {0: 10})
        assert server.label == "0"

    run(work)


def test_a_replica_that_is_away_during_a_publication_gets_it_when_it_is_back(tmp_path: Path) -> None:
    async def work(sampler: VllmSampler, one: FakeVllm, two: FakeVllm) -> None:
        await sampler.publish(write_weights(tmp_path / "v0", 10), 0)
        await two.stop()
        await sampler.publish(write_weights(tmp_path / "v1", 11), 1)
        assert one.weights == 11
        await two.crash_and_come_back()
        await until(lambda: all(r.up for r in sampler.replicas))
        assert (two.weights, two.label, two.paused) == (11, "1", None)

    run(work, 2)


def test_a_server_that_somebody_left_paused_is_resumed_at_the_start() -> None:
    server = FakeVllm()
    server.paused = "keep"

    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        check(await sampler.sample(request()), {None: 0})

    run(work, [server])


def test_a_server_whose_weights_are_published_keeps_its_version_for_evaluation() -> None:
    server = FakeVllm(weights=4)
    server.label = "12.abc"

    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        assert sampler.policy_version == 12
        check(await sampler.sample(request()), {12: 4})

    run(work, [server])


def test_a_server_without_development_endpoints_samples_and_says_what_it_lacks(tmp_path: Path) -> None:
    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        check(await sampler.sample(request()), {None: 0})
        with pytest.raises(ModelError, match="VLLM_SERVER_DEV_MODE=1"):
            await sampler.publish(write_weights(tmp_path / "v0", 10), 0)

    run(work, [FakeVllm(development=False)])


def test_random_faults_never_lose_duplicate_or_mix_up_tokens(tmp_path: Path) -> None:
    """The whole class: twelve sessions over two servers that break, restart and change weights meanwhile."""

    async def work(sampler: VllmSampler, *servers: FakeVllm) -> None:
        weights: dict[int | None, int] = {}
        for server in servers:
            server.step_s = 0.001
            server.faults[GENERATE].extend([broken, lambda _: None, half, lambda _: None, status(500)])

        async def session(number: int) -> Counter[int | None]:
            prompt: tuple[int, ...] = (number + 2,)
            seen: Counter[int | None] = Counter()
            for turn in range(4):
                result = await sampler.sample(request(prompt, id=f"g{number % 3}.{number}.1.c{turn}"))
                assert result.prompt_token_ids == prompt
                check(result, weights)
                prompt = prompt + result.token_ids + (2,)
                seen.update(v.version for v in result.policy_versions)
            return seen

        weights[0] = 100
        await sampler.publish(write_weights(tmp_path / "0", 100), 0)
        sessions = [asyncio.create_task(session(i)) for i in range(12)]
        for version in (1, 2, 3):
            await asyncio.sleep(0.03)
            weights[version] = 100 + version
            mode: Any = ("keep", "abort", "keep")[version - 1]
            await sampler.publish(
                write_weights(tmp_path / str(version), 100 + version), version, in_flight=mode
            )
            if version == 2:
                await servers[1].crash_and_come_back()
        await asyncio.gather(*sessions)
        counts = sampler.counts
        assert counts.finished == counts.requests == 48
        assert counts.pauses == counts.resumes == counts.updates == 4

    run(work, 2)


def test_a_replica_whose_weights_are_lost_stays_paused_until_it_has_some(tmp_path: Path) -> None:
    """A load that fails half way, and taking back fails too: a step would end that engine, so there is
    none."""

    async def work(sampler: VllmSampler, one: FakeVllm, two: FakeVllm) -> None:
        await sampler.publish(write_weights(tmp_path / "v0", 10), 0)

        def lose(body: dict[str, Any]) -> Any:
            two.weights = None
            return Answer(500, {"error": {"message": "half way"}})

        two.faults["/collective_rpc"].extend([lambda _: None, lose, lose])
        with pytest.raises(ModelError, match="half way"):
            await sampler.publish(write_weights(tmp_path / "v1", 11), 1)
        assert (one.weights, one.label, one.paused) == (10, "0", None)
        assert two.paused == "keep" or two.weights == 10
        results = await asyncio.gather(*(sampler.sample(request(id=f"g{i}.0.1.c0")) for i in range(8)))
        for result in results:
            check(result, {0: 10})
        await until(lambda: all(r.up for r in sampler.replicas))
        assert (two.weights, two.label, two.paused) == (10, "0", None)

    run(work, 2)


def test_a_server_left_in_the_middle_of_a_load_gets_weights_before_it_is_resumed() -> None:
    """A trainer killed between load and label: whatever is in there is nobody's version."""
    server = FakeVllm(weights=3)
    server.weights, server.label, server.paused = None, "loading", "keep"

    async def work(sampler: VllmSampler, server: FakeVllm) -> None:
        assert (server.weights, server.label, server.paused) == (3, "default", None)
        assert sampler.policy_version is None
        check(await sampler.sample(request()), {None: 3})

    run(work, [server])
