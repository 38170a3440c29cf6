"""The in-process sampler: exact log-probs, isolation of requests, weight updates, no leftovers."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
import torch
from tiny_llama import STOP, VOCAB, model, plain_log_probs, request, sampler, twin, worst_difference
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig, Qwen3Config

from agentrl.errors import ConfigError, ModelError
from agentrl.inference.engine import Engine
from agentrl.inference.local import LocalSampler
from agentrl.inference.resume import remaining, sample_whole
from agentrl.inference.sampler import SampleRequest, SampleResult
from agentrl.inference.states import EngineState
from agentrl.types import FinishReason, LogProbKind, VersionSpan

TOLERANCE = 2e-5
T = TypeVar("T")


async def until(condition: Callable[[], bool], *, deadline_s: float = 20.0) -> None:
    """Poll what another thread changes."""
    ends = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < ends:  # noqa: ASYNC110  (no event crosses the thread)
        await asyncio.sleep(0.002)
    assert condition()


def run(work: Callable[[LocalSampler], Coroutine[Any, Any, T]], made: Any = None, **options: Any) -> T:
    """Run `work` with a sampler, close it, and check that nothing is left behind."""

    async def whole() -> T:
        engine = sampler(model() if made is None else made, **options)
        try:
            result = await work(engine)
            await until(lambda: not engine.active)
        finally:
            await engine.close()
        assert engine.active == 0
        counts = engine.counts
        assert counts.requests <= counts.finished + counts.cancelled + counts.failed
        return result

    before = threading.active_count()
    answer = asyncio.run(whole())
    assert threading.active_count() <= before
    return answer


# ------------------------------------------------------------------------------------------------- log-probs


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_log_probs_equal_a_plain_forward_over_ragged_rows_and_many_turns(kv_heads: int) -> None:
    made = model(kv_heads=kv_heads)
    reference = twin(made)
    dice = random.Random(3)

    async def work(engine: LocalSampler) -> float:
        async def talk(number: int) -> float:
            ids = [dice.randrange(2, VOCAB) for _ in range(dice.randrange(1, 40))]
            temperature = dice.choice([0.5, 1.0, 1.7])
            worst = 0.0
            for turn in range(4):
                result = await engine.sample(
                    request(
                        ids,
                        id=f"{number}.{turn}",
                        session=str(number),
                        temperature=temperature,
                        max_tokens=dice.randrange(1, 30),
                    )
                )
                assert result.prompt_token_ids == tuple(ids)
                assert result.log_prob_kind is LogProbKind.PROCESSED
                worst = max(worst, worst_difference(reference, result, temperature=temperature))
                ids = [
                    *ids,
                    *result.token_ids,
                    *(dice.randrange(2, VOCAB) for _ in range(dice.randrange(1, 9))),
                ]
                if dice.random() < 0.2:  # a branch: history is cut and goes on differently
                    ids = [*ids[: len(ids) // 2], dice.randrange(2, VOCAB)]
                await asyncio.sleep(dice.random() * 0.01)
            return worst

        worst = max(await asyncio.gather(*(talk(n) for n in range(24))))
        assert engine.counts.reused_tokens > engine.counts.prefilled_tokens / 4
        return worst

    assert run(work, made, max_slots=9, idle_slots=20) < TOLERANCE


def test_a_small_pool_of_slots_changes_nothing() -> None:
    made = model()
    reference = twin(made)

    async def work(engine: LocalSampler) -> float:
        results = await asyncio.gather(
            *(engine.sample(request(range(2, 5 + n), id=str(n), session=str(n % 3))) for n in range(12))
        )
        return max(worst_difference(reference, r) for r in results)

    assert run(work, made, max_slots=1, idle_slots=0) < TOLERANCE


def test_a_group_prefills_its_common_prompt_once() -> None:
    made = model()
    reference = twin(made)
    prompt = [2 + i % 90 for i in range(100)]

    async def work(engine: LocalSampler) -> tuple[float, int]:
        await engine.pause()
        tasks = [
            asyncio.create_task(engine.sample(request([*prompt, 5 + n], id=str(n), session=str(n))))
            for n in range(8)
        ]
        await asyncio.sleep(0.05)
        await engine.resume()
        results = await asyncio.gather(*tasks)
        return max(worst_difference(reference, r) for r in results), engine.counts.prefilled_tokens

    worst, prefilled = run(work, made)
    assert worst < TOLERANCE
    assert prefilled == 101 + 7


def test_only_the_new_tokens_of_the_next_turn_are_prefilled() -> None:
    async def work(engine: LocalSampler) -> tuple[int, int]:
        first = await engine.sample(request(range(2, 42), id="a"))
        before = engine.counts.prefilled_tokens
        ids = [*first.prompt_token_ids, *first.token_ids, 7, 8, 9]
        await engine.sample(request(ids, id="b"))
        return before, engine.counts.prefilled_tokens - before

    assert run(work) == (40, 3 + 1), "three new ones, and the last sampled one, which was never fed"


def test_a_long_prompt_is_prefilled_in_pieces_with_the_same_log_probs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentrl.inference.engine.PREFILL_CHUNK", 16)
    monkeypatch.setattr("agentrl.inference.engine.PREFILL_TOKENS", 20)
    made = model()
    reference = twin(made)

    async def work(engine: LocalSampler) -> float:
        results = await asyncio.gather(
            *(
                engine.sample(request([2 + (i * n) % 90 for i in range(n * 25)], id=str(n), session=str(n)))
                for n in range(1, 6)
            )
        )
        return max(worst_difference(reference, r) for r in results)

    assert run(work, made) < TOLERANCE


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=128,
        ),
        MistralConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            sliding_window=None,
        ),
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    ],
    ids=["qwen3", "mistral", "gpt2"],
)
def test_other_architectures_are_exact_too(config: Any) -> None:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config).eval()
    reference = twin(made)

    async def work(engine: LocalSampler) -> float:
        results = await asyncio.gather(
            *(engine.sample(request(range(2, 6 + 3 * n), id=str(n), session=str(n))) for n in range(5))
        )
        return max(worst_difference(reference, r) for r in results)

    assert run(work, made) < TOLERANCE


def test_a_sliding_window_shorter_than_the_context_is_refused() -> None:
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=16,
    )
    made = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="16"):
        sampler(made)
    engine = sampler(made, max_context=16)
    asyncio.run(engine.close())


# --------------------------------------------------------------------------------------------------- sampling


def test_temperature_divides_the_logits_before_the_softmax() -> None:
    """LGP-01 by hand: logits [2, 1, 0] at T = 0.5 give ln p(1) = -2.142932."""
    from_hand = {0.5: -2.142932, 1.0: -1.407606}
    for temperature, expected in from_hand.items():
        logp = torch.log_softmax(torch.tensor([2.0, 1.0, 0.0]) / temperature, -1)
        assert float(logp[1]) == pytest.approx(expected, abs=1e-6)
    made = model()
    reference = twin(made)

    async def work(engine: LocalSampler) -> None:
        for temperature in (0.5, 1.0, 2.0):
            result = await engine.sample(request([5, 6, 7], id=str(temperature), temperature=temperature))
            assert worst_difference(reference, result, temperature=temperature) < TOLERANCE

    run(work, made)


def test_greedy_takes_the_most_likely_id_and_says_that_its_log_probs_are_raw() -> None:
    made = model()
    reference = twin(made)

    async def work(engine: LocalSampler) -> None:
        result = await engine.sample(request([5, 6, 7], temperature=0.0))
        assert result.log_prob_kind is LogProbKind.RAW
        assert worst_difference(reference, result) < TOLERANCE
        ids = list(result.prompt_token_ids)
        for token in result.token_ids:
            with torch.no_grad():
                assert int(reference(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)

    run(work, made)


def test_frequencies_are_those_of_the_distribution() -> None:
    made = model()
    with torch.no_grad():
        p_V = torch.softmax(twin(made)(input_ids=torch.tensor([[9, 4]])).logits[0, -1], -1).tolist()

    async def work(engine: LocalSampler) -> Counter[int]:
        results = await asyncio.gather(
            *(engine.sample(request([9, 4], id=str(n), session=str(n), max_tokens=1)) for n in range(2000))
        )
        return Counter(r.token_ids[0] for r in results)

    seen = run(work, made)
    distance = sum(abs(seen[i] / 2000 - p_V[i]) for i in range(VOCAB)) / 2
    assert distance < 0.08


def test_top_k_and_top_p_report_log_probs_of_what_was_left() -> None:
    made = model()
    reference = twin(made)

    async def work(engine: LocalSampler) -> None:
        mixed = await asyncio.gather(
            engine.sample(request([9, 4], id="k", session="k", top_k=2, max_tokens=20)),
            engine.sample(request([9, 4], id="p", session="p", top_p=0.5, max_tokens=20)),
            engine.sample(request([9, 4], id="n", session="n", max_tokens=20)),
        )
        assert worst_difference(reference, mixed[2]) < TOLERANCE
        for result, top_k, top_p in ((mixed[0], 2, 1.0), (mixed[1], 0, 0.5)):
            ids = list(result.prompt_token_ids)
            for token, log_prob in zip(result.token_ids, result.log_probs or (), strict=True):
                with torch.no_grad():
                    p = torch.softmax(reference(input_ids=torch.tensor([ids])).logits[0, -1], -1).tolist()
                ordered = sorted(range(VOCAB), key=lambda i: -p[i])
                kept: list[int] = []
                for i in ordered:
                    if (top_k and len(kept) == top_k) or (top_p < 1 and sum(p[j] for j in kept) >= top_p):
                        break
                    kept.append(i)
                assert token in kept
                expected = torch.log(torch.tensor(p[token] / sum(p[j] for j in kept)))
                assert log_prob == pytest.approx(float(expected), abs=1e-4)
                ids.append(token)

    run(work, made)


def test_a_seed_makes_a_request_repeatable_among_others() -> None:
    async def work(engine: LocalSampler) -> None:
        noise = [
            engine.sample(request([3, n + 2], id=f"n{n}", session=f"n{n}", max_tokens=30)) for n in range(5)
        ]
        same = [engine.sample(request([9, 4], id=f"s{n}", session=f"s{n}", seed=11)) for n in range(2)]
        results = await asyncio.gather(*noise, *same)
        assert results[5].token_ids == results[6].token_ids
        again = await engine.sample(request([9, 4], id="again", session="again", seed=11))
        assert again.token_ids == results[5].token_ids

    run(work)


# ------------------------------------------------------------------------------------------------------- ends


def test_the_stop_token_is_sampled_kept_and_has_its_log_prob() -> None:
    """MSK-02, MSK-11: the end is an action like any other, whatever its id means elsewhere."""
    made = model()
    reference = twin(made)

    async def work(engine: LocalSampler) -> None:
        stops = tuple(range(2, VOCAB, 2))
        result = await engine.sample(request([9, 2, 9, 2], stop_token_ids=stops, max_tokens=200))
        assert result.finish_reason is FinishReason.STOP
        assert result.token_ids[-1] in (*stops, STOP)
        assert not set(result.token_ids[:-1]) & {*stops, STOP}
        assert worst_difference(reference, result) < TOLERANCE

    run(work, made)


def test_max_tokens_and_the_context_end_as_length() -> None:
    async def work(engine: LocalSampler) -> None:
        none = {"stop_token_ids": ()}
        short = await engine.sample(request([9, 4], id="a", max_tokens=3, **none))
        assert (short.finish_reason, len(short.token_ids)) == (FinishReason.LENGTH, 3)
        full = await engine.sample(request([2 + i % 90 for i in range(60)], id="b", max_tokens=50, **none))
        assert (full.finish_reason, len(full.token_ids)) == (FinishReason.LENGTH, 4)

    run(work, max_context=64, stop_token_ids=())


@pytest.mark.parametrize(
    ("ids", "code"),
    [([], "empty_prompt"), ([VOCAB], "token_id"), ([-1], "token_id"), ([2] * 64, "context")],
)
def test_a_bad_request_is_refused_and_the_others_go_on(ids: list[int], code: str) -> None:
    async def work(engine: LocalSampler) -> None:
        good = [
            asyncio.create_task(engine.sample(request([9, n + 2], id=str(n), session=str(n))))
            for n in range(6)
        ]
        with pytest.raises(ModelError) as caught:
            await engine.sample(request(ids, id="bad", session="bad"))
        assert (caught.value.code, caught.value.owner) == (code, "model")
        assert caught.value.fix
        assert len(await asyncio.gather(*good)) == 6

    run(work, max_context=64)


def test_logits_that_are_not_finite_fail_their_requests_and_leave_no_poison() -> None:
    made = model()
    reference = twin(made)

    async def work(engine: LocalSampler) -> None:
        with torch.no_grad():
            made.model.embed_tokens.weight[50] = float("nan")
        good = engine.sample(request([9, 4], id="good", session="good", max_tokens=2, top_k=1))
        bad = engine.sample(request([9] * 40 + [50], id="bad", session="bad"))
        results = await asyncio.gather(good, bad, return_exceptions=True)
        assert isinstance(results[1], ModelError)
        assert results[1].code == "nonfinite"
        with torch.no_grad():
            made.model.embed_tokens.weight[50] = reference.model.embed_tokens.weight[50]
        # Whoever gets the slot next is shorter than the poison was, beside a row that is longer.
        after = await asyncio.gather(
            *(
                engine.sample(request([9, 4] * n, id=f"x{n}", session=f"x{n}", stop_token_ids=()))
                for n in (1, 40, 2, 30)
            )
        )
        assert max(worst_difference(reference, result) for result in after) < TOLERANCE

    run(work, made, max_slots=2, idle_slots=0)


def test_an_exception_inside_a_forward_fails_its_rows_and_the_engine_lives() -> None:
    made = model()
    forward = made.model.layers[0].mlp.forward

    async def work(engine: LocalSampler) -> None:
        def broken(x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of memory, says the test")

        made.model.layers[0].mlp.forward = broken
        with pytest.raises(ModelError, match="out of memory") as caught:
            await engine.sample(request([9, 4], id="a"))
        assert caught.value.code == "engine"
        made.model.layers[0].mlp.forward = forward
        assert (await engine.sample(request([9, 4], id="b"))).token_ids

    run(work, made)


def test_a_bug_in_the_engine_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(self: Engine) -> None:
        raise ZeroDivisionError("a bug, says the test")

    async def work(engine: LocalSampler) -> None:
        running = asyncio.create_task(engine.sample(request([9, 4], max_tokens=400)))
        await until(lambda: engine.counts.generated_tokens > 0)
        monkeypatch.setattr(Engine, "drop_cancelled", bug)
        with pytest.raises(ModelError, match="a bug") as caught:
            await running
        assert caught.value.code == "engine"
        with pytest.raises(ModelError, match="closed"):
            await engine.sample(request([9, 4], id="next"))

    run(work, stop_token_ids=())


def test_no_memory_for_one_row_fails_that_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Engine._make_room

    def scarce(self: Engine, row: Any) -> None:
        if row.request.id == "big":
            raise MemoryError("says the test")
        room(self, row)

    monkeypatch.setattr(Engine, "_make_room", scarce)

    async def work(engine: LocalSampler) -> None:
        for n in range(3):
            results = await asyncio.gather(
                engine.sample(request([9, 4], id=f"a{n}", session="a")),
                engine.sample(request([9, 4], id="big", session="b")),
                return_exceptions=True,
            )
            assert not isinstance(results[0], BaseException)
            assert isinstance(results[1], ModelError)

    run(work, max_slots=2, idle_slots=0)


def test_rows_that_could_outgrow_the_memory_are_refused_and_idle_slots_give_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    per_row = 512 * 2 * 2 * 2 * 8 * 4  # tokens x (keys, values) x layers x heads x size x float32
    monkeypatch.setattr("agentrl.inference.engine._memory_bytes", lambda device: 12 * per_row)
    with pytest.raises(ConfigError, match="max_slots"):
        sampler(model(), max_slots=13)

    async def work(engine: LocalSampler) -> None:
        for n in range(8):
            await engine.sample(request([9, 4], id=str(n), session=str(n), max_tokens=1))
        assert len(engine._engine._slots) == 6, "four active, and two idle within half of the memory"

    run(work, max_slots=4)


# --------------------------------------------------------------------------------- deadlines and cancellation


def test_a_deadline_is_a_model_error_and_frees_the_slot() -> None:
    async def work(engine: LocalSampler) -> None:
        await engine.pause()
        with pytest.raises(ModelError, match="engine paused") as caught:
            await engine.sample(request([9, 4], deadline_s=0.05))
        assert caught.value.code == "deadline"
        await engine.resume()
        assert (await engine.sample(request([9, 4], id="next"))).token_ids

    run(work)


def test_cancelling_a_task_aborts_its_row_and_no_other() -> None:
    async def work(engine: LocalSampler) -> None:
        tasks = [
            asyncio.create_task(engine.sample(request([9, n + 2], id=str(n), session=str(n), max_tokens=400)))
            for n in range(8)
        ]
        await asyncio.sleep(0.05)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results[::2])
        assert all(not isinstance(r, BaseException) for r in results[1::2])
        assert engine.counts.cancelled <= 4

    run(work, stop_token_ids=())


def test_a_cancelled_row_leaves_a_prefix_that_is_still_exact() -> None:
    made = model()
    reference = twin(made)

    async def work(engine: LocalSampler) -> float:
        task = asyncio.create_task(engine.sample(request(range(2, 40), id="a", max_tokens=400)))
        await asyncio.sleep(0.03)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        result = await engine.sample(request(range(2, 44), id="b"))
        return worst_difference(reference, result)

    assert run(work, made, stop_token_ids=()) < TOLERANCE


def test_closing_fails_what_is_in_flight_and_refuses_what_comes() -> None:
    async def whole() -> None:
        engine = sampler(model(), stop_token_ids=())
        task = asyncio.create_task(engine.sample(request([9, 4], max_tokens=500)))
        await asyncio.sleep(0.02)
        await engine.close()
        with pytest.raises(ModelError) as caught:
            await task
        assert caught.value.code == "closed"
        with pytest.raises(ModelError, match="closed"):
            await engine.sample(request([9, 4]))
        await engine.close()
        assert engine.state is EngineState.CLOSED

    asyncio.run(whole())


def test_tasks_of_two_event_loops_share_one_sampler() -> None:
    engine = sampler(model())
    answers: list[Any] = []

    def other() -> None:
        answers.append(asyncio.run(engine.sample(request([3, 4], id="o", session="o"))))

    threads = [threading.Thread(target=other) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(answers) == 3
    asyncio.run(engine.close())


# --------------------------------------------------------------------------------------------- weight updates


def test_an_update_in_mid_flight_aborts_nothing_and_stamps_each_token() -> None:
    """ASY-04: 16 requests, one update; later tokens are samples of the new policy over the whole prefix."""
    made = model()
    old, new = twin(made), model(seed=5)

    async def work(engine: LocalSampler) -> None:
        tasks = [
            asyncio.create_task(
                engine.sample(request([9, n + 2], id=str(n), session=str(n), max_tokens=120 + n))
            )
            for n in range(16)
        ]
        await until(lambda: engine.counts.generated_tokens >= 16 * 10)
        await engine.publish(new.state_dict(), 1)
        assert engine.policy_version == 1
        results = await asyncio.gather(*tasks)
        assert engine.counts.cancelled == engine.counts.failed == 0
        for result in results:
            first, second = result.policy_versions
            assert (first.version, second.version) == (0, 1)
            assert first.end == second.start >= 10
            ids = result.prompt_token_ids + result.token_ids
            start = len(result.prompt_token_ids)
            log_probs = torch.tensor(result.log_probs)
            before = plain_log_probs(old, ids, start)[: first.end]
            after = plain_log_probs(new, ids, start)[first.end :]
            assert float((log_probs[: first.end] - before).abs().max()) < TOLERANCE
            assert float((log_probs[first.end :] - after).abs().max()) < TOLERANCE
        assert (engine.counts.pauses, engine.counts.resumes) == (1, 1)

    run(work, made, stop_token_ids=())


def test_no_prefix_survives_an_update() -> None:
    made = model()
    new = model(seed=5)

    async def work(engine: LocalSampler) -> float:
        first = await engine.sample(request(range(2, 60), id="a"))
        await engine.publish(new.state_dict(), 1)
        again = await engine.sample(request([*range(2, 60), *first.token_ids, 5], id="b"))
        assert again.policy_versions == (VersionSpan(version=1, start=0, end=len(again.token_ids)),)
        return worst_difference(new, again)

    assert run(work, made) < TOLERANCE


def test_a_draining_update_waits_for_rows_in_flight_and_lets_nobody_new_start() -> None:
    made = model()
    new = model(seed=5)

    async def work(engine: LocalSampler) -> None:
        running = asyncio.create_task(engine.sample(request([9, 4], id="a", session="a", max_tokens=100)))
        await until(lambda: engine.counts.generated_tokens > 0)
        update = asyncio.create_task(engine.publish(new.state_dict(), 1, drain=True))
        await asyncio.sleep(0)
        later = asyncio.create_task(engine.sample(request([9, 4], id="b", session="b")))
        assert {s.version for s in (await running).policy_versions} == {0}
        await update
        assert {s.version for s in (await later).policy_versions} == {1}

    run(work, made, stop_token_ids=())


@pytest.mark.parametrize("kind", ["raises", "nan", "missing"])
def test_a_failed_update_leaves_the_old_weights_the_old_version_and_a_running_engine(kind: str) -> None:
    """ASY-07: pauses equal resumes also after failures; pending requests complete."""
    made = model()
    old = twin(made)

    async def work(engine: LocalSampler) -> None:
        pending = asyncio.create_task(engine.sample(request([9, 4], id="p", session="p", max_tokens=80)))

        def raises() -> None:
            made.lm_head.weight.zero_()
            raise OSError("the file is gone")

        def nan() -> None:
            made.lm_head.weight[3, 3] = float("nan")

        if kind == "missing":
            half = {n: t + 1 for n, t in made.state_dict().items() if "lm_head" not in n}
            with pytest.raises(ModelError, match=r"lm_head\.weight"):
                await engine.publish(half, 1)
        else:
            with pytest.raises(OSError if kind == "raises" else ModelError):
                await engine.update_weights(raises if kind == "raises" else nan, 1)
        assert (engine.policy_version, engine.state) == (0, EngineState.RUNNING)
        assert worst_difference(old, await pending) < TOLERANCE
        for version in (1, 2, 3):
            await engine.update_weights(lambda: None, version)
        assert engine.counts.pauses == engine.counts.resumes == 4
        assert engine.policy_version == 3
        for version in (3, 2):
            with pytest.raises(ModelError, match="not above"):
                await engine.update_weights(lambda: None, version)

    run(work, made, stop_token_ids=())


def test_pause_and_resume_are_paired_and_everything_else_is_refused() -> None:
    """ASY-06."""

    async def work(engine: LocalSampler) -> None:
        with pytest.raises(ModelError, match="running and can not become running"):
            await engine.resume()
        await engine.pause()
        with pytest.raises(ModelError, match="paused and can not become paused"):
            await engine.pause()
        waiting = asyncio.create_task(engine.sample(request([9, 4])))
        await engine.update_weights(lambda: None, 1)
        assert engine.state is EngineState.PAUSED, "a pause of ours is not ended by an update"
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await engine.resume()
        result = await waiting
        assert {s.version for s in result.policy_versions} == {1}
        with pytest.raises(ModelError):
            await engine.resume()

    run(work)


def test_a_draining_update_does_not_keep_a_paused_engine_from_resuming() -> None:
    async def work(engine: LocalSampler) -> None:
        running = asyncio.create_task(engine.sample(request([9, 4], max_tokens=60)))
        await until(lambda: engine.counts.generated_tokens > 0)
        await engine.pause()
        update = asyncio.create_task(engine.update_weights(lambda: None, 1, drain=True))
        await asyncio.sleep(0.02)
        await engine.resume()
        await asyncio.gather(running, update)
        assert engine.policy_version == 1

    run(work, stop_token_ids=())


def test_a_policy_without_versions_has_no_spans() -> None:
    async def work(engine: LocalSampler) -> None:
        assert engine.policy_version is None
        assert (await engine.sample(request([9, 4]))).policy_versions == ()

    run(work, version=None)


# ----------------------------------------------------------------------------------------------------- storms


def test_a_storm_of_requests_cancellations_and_updates_stays_exact_and_leaves_nothing() -> None:
    made = model()
    weights = [twin(made), model(seed=1), model(seed=2), model(seed=3)]
    dice = random.Random(1)

    async def work(engine: LocalSampler) -> int:
        checked = 0

        async def talk(number: int) -> None:
            nonlocal checked
            ids = [dice.randrange(2, VOCAB) for _ in range(dice.randrange(1, 30))]
            for turn in range(3):
                result = await engine.sample(
                    request(ids, id=f"{number}.{turn}", session=str(number), max_tokens=dice.randrange(1, 60))
                )
                whole = result.prompt_token_ids + result.token_ids
                for span in result.policy_versions:
                    plain = plain_log_probs(weights[span.version], whole, len(ids))
                    got = torch.tensor((result.log_probs or ())[span.start : span.end])
                    assert float((plain[span.start : span.end] - got).abs().max()) < TOLERANCE
                checked += 1
                ids = [*whole, dice.randrange(2, VOCAB)]

        async def publish() -> None:
            for version in (1, 2, 3):
                await asyncio.sleep(0.1)
                await engine.publish(weights[version].state_dict(), version, drain=version == 2)

        tasks = [asyncio.create_task(talk(n)) for n in range(40)]
        updates = asyncio.create_task(publish())
        await asyncio.sleep(0.05)
        for task in dice.sample(tasks, 10):
            await asyncio.sleep(0.01)
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await updates
        assert not [o for o in outcomes if isinstance(o, Exception)]
        return checked

    assert run(work, made, max_slots=16, idle_slots=8) >= 90


def test_a_decode_step_costs_little_more_than_its_forward() -> None:
    made = model()
    engine = Engine(
        made,
        stop_token_ids=(),
        name="t",
        version=0,
        max_slots=64,
        idle_slots=0,
        max_context=None,
        seed=0,
    )
    for n in range(64):
        engine.submit(
            engine.row(request([9, n + 2], id=str(n), session=str(n), max_tokens=200), lambda o: None)
        )
    engine.step()
    inside = 0.0
    forward = made.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        started = time.thread_time()
        try:
            return forward(*args, **kwargs)
        finally:
            inside += time.thread_time() - started

    made.forward = timed
    started = time.thread_time()
    for _ in range(40):
        engine.step()
    outside = (time.thread_time() - started - inside) / 40
    assert outside < 0.004, f"{outside * 1000:.2f} ms beside the forward of 64 rows"


# ------------------------------------------------------------------------------------------------- aborting


def test_aborted_rows_go_on_from_the_tokens_they_have_with_a_version_per_token() -> None:
    """ASY-04, SRV-09: nothing is lost, drawn twice or asked for again beyond the budget."""

    async def work(engine: LocalSampler) -> None:
        before, after = twin(model(seed=0)), twin(model(seed=3))
        asked = [request((5, i + 2, 9), id=f"r{i}", session=f"s{i}", max_tokens=200) for i in range(6)]
        tasks = [asyncio.create_task(engine.sample(one)) for one in asked]
        for _ in range(3):
            await until(lambda: engine._engine.in_flight > 0 or all(t.done() for t in tasks))
            await engine.abort()
        await engine.publish(after.state_dict(), 1)
        for one, result in zip(asked, await asyncio.gather(*tasks), strict=True):
            assert result.request_id == one.id
            assert result.prompt_token_ids == one.prompt_token_ids
            assert result.finish_reason is not FinishReason.ABORT
            assert result.log_probs is not None
            assert len(result.log_probs) == len(result.token_ids) <= 200
            ids = result.prompt_token_ids + result.token_ids
            for span in result.policy_versions:
                start = len(result.prompt_token_ids) + span.start
                reference = before if span.version == 0 else after
                stop = len(result.prompt_token_ids) + span.end
                plain = plain_log_probs(reference, ids[:stop], start)
                told = torch.tensor(result.log_probs[span.start : span.end])
                assert float((plain - told).abs().max()) < TOLERANCE
        assert engine.counts.requests > len(asked), "some were taken up again"

    run(work)


def test_an_engine_that_aborts_whatever_it_sees_is_not_asked_for_ever() -> None:
    async def leg(asked: SampleRequest) -> SampleResult:
        return SampleResult(
            request_id=asked.id,
            prompt_token_ids=asked.prompt_token_ids,
            token_ids=(),
            log_probs=(),
            log_prob_kind=LogProbKind.PROCESSED,
            policy_versions=(),
            finish_reason=FinishReason.ABORT,
            model="m",
            started_at=1.0,
            finished_at=1.0,
        )

    with pytest.raises(ModelError, match="was aborted 64 times") as caught:
        asyncio.run(sample_whole(leg, request((1, 2)), context=64))
    assert caught.value.code == "aborted"


@pytest.mark.parametrize(
    ("context", "prompt", "generated", "left"), [(40, 8, 10, 14), (40, 20, 10, 10), (40, 8, 24, 0)]
)
def test_what_a_resumed_generation_may_still_ask_for(
    context: int, prompt: int, generated: int, left: int
) -> None:
    """SRV-09: max_new 24."""
    assert remaining(max_new=24, generated=generated, context=context, prompt=prompt) == left
