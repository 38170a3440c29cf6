"""The slow reference: every recipe written again, in plain Python loops over lists, from its equation.

Nothing here imports an operator. `reference(name, columns, live)` answers the loss and its hand-derived
gradient with respect to the log-probs (and the critic's values where there is one), or raises `KeyError` for
a recipe it lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

EPS = 1e-6


@dataclass
class Traj:
    """One graded trajectory as lists over its action tokens."""

    index: int
    group: int
    reward: float
    truncated: bool
    at: list[int]
    turns: list[int]
    col: dict[str, list[float]]
    one: dict[str, Any]
    adv: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    live: bool = True

    @property
    def n(self) -> int:
        return len(self.at)


def read(columns: Any, live: dict[str, Any]) -> list[Traj]:
    """Graded trajectories of a batch."""
    out, start = [], 0
    for s, length in enumerate(columns.layout.lengths_S.tolist()):
        at = list(range(start, start + length))
        start += length
        reward = float(columns.reward_S[s])
        if math.isnan(reward):
            continue
        col = {
            k: [float(getattr(columns, k)[i]) for i in at]
            for k in (
                "logb_N", "prox_logp_N", "ref_logp_N", "teacher_logp_N", "prm_logp_N", "values_N",
                "entropy_N", "turn_reward_N", "node_value_N", "potential_N",
            )
        }  # fmt: skip
        col |= {"live_" + k: [float(v[i]) for i in at] for k, v in live.items()}
        one = {
            k: getattr(columns, k)[s].tolist()
            for k in (
                "bootstrap_S", "components_SK", "greedy_reward_S", "off_policy_S", "density_S", "answer_S",
                "exit_index_S", "first_attempt_S", "history_mean_S", "history_std_S", "history_step_S",
            )
        }  # fmt: skip
        turns = [int(columns.layout.turn_N[i]) for i in at]
        out.append(
            Traj(s, int(columns.layout.group_S[s]), reward, bool(columns.truncated_S[s]), at, turns, col, one)
        )
    return out


def groups(ts: list[Traj]) -> list[list[Traj]]:
    return [[t for t in ts if t.group == g] for g in sorted({t.group for t in ts})]


# ------------------------------------------------------------------------------------------------ advantages


def flat(
    ts: list[Traj], f: Callable[[list[float]], list[float]], r: Callable[[Traj], float] = lambda t: t.reward
) -> None:
    """A group function of scalars, broadcast."""
    for g in groups(ts):
        values = [r(t) for t in g]
        usable = len(g) >= 2
        same = max(values) - min(values) <= 1e-6
        for t, a in zip(g, f(values) if usable and not same else [0.0] * len(g), strict=True):
            t.adv = [a] * t.n
            t.live = t.live and usable


def z(v: list[float]) -> list[float]:
    return [(x - fmean(v)) / (pstdev(v) + EPS) for x in v]


def centre(v: list[float]) -> list[float]:
    return [x - fmean(v) for x in v]


def loo(v: list[float]) -> list[float]:
    return [x - (sum(v) - x) / (len(v) - 1) for x in v]


def scaled(ts: list[Traj], get: Callable[[Traj], list[float]]) -> None:
    """Whiten over all tokens."""
    every = [x for t in ts for x in get(t)]
    m, s = fmean(every), pstdev(every) + 1e-8
    for t in ts:
        t.adv = [(x - m) / s for x in get(t)]


def to_go(r: list[float], gamma: float = 1.0) -> list[float]:
    out, carry = [], 0.0
    for x in reversed(r):
        carry = x + gamma * carry
        out.append(carry)
    return out[::-1]


def placed(t: Traj, token: list[float] | None = None, reward: float | None = None) -> list[float]:
    r = list(token) if token else [0.0] * t.n
    r[-1] += t.reward if reward is None else reward
    return r


def run_gae(r: list[float], v: list[float], final: float, lam: float) -> list[float]:
    out, carry, following = [], 0.0, final
    for x, value in zip(reversed(r), reversed(v), strict=True):
        carry = x + following - value + lam * carry
        following = value
        out.append(carry)
    return out[::-1]


def critic(
    ts: list[Traj],
    lam: Callable[[Traj], float],
    lam_v: float,
    token: Callable[[Traj], list[float] | None] = lambda t: None,
) -> None:
    for t in ts:
        final = t.one["bootstrap_S"] if t.truncated else 0.0
        v, r = t.col["values_N"], placed(t, token(t))
        t.adv = run_gae(r, v, final, lam(t))
        t.returns = [a + b for a, b in zip(run_gae(r, v, final, lam_v), v, strict=True)]


def whiten(ts: list[Traj]) -> None:
    scaled(ts, lambda t: t.adv)


def kl_tokens(t: Traj, beta: float) -> list[float]:
    return [-beta * (b - q) for b, q in zip(t.col["logb_N"], t.col["ref_logp_N"], strict=True)]


def units(t: Traj) -> list[list[int]]:
    """Token positions of each turn, in order."""
    out: dict[int, list[int]] = {}
    for i, k in enumerate(t.turns):
        out.setdefault(k, []).append(i)
    return list(out.values())


def over_turns(t: Traj, per_turn: list[float]) -> list[float]:
    out = [0.0] * t.n
    for a, positions in zip(per_turn, units(t), strict=True):
        for i in positions:
            out[i] = a
    return out


def turn_gae(t: Traj, lam: float) -> None:
    r = placed(t)
    u = units(t)
    v = [t.col["values_N"][p[0]] for p in u]
    final = t.one["bootstrap_S"] if t.truncated else 0.0
    a = run_gae([sum(r[i] for i in p) for p in u], v, final, lam)
    t.adv = over_turns(t, a)
    t.returns = over_turns(t, [x + y for x, y in zip(a, v, strict=True)])


def wins_only(ts: list[Traj]) -> None:
    """Groups without spread leave the loss."""
    for g in groups(ts):
        if max(t.reward for t in g) - min(t.reward for t in g) <= 1e-6:
            for t in g:
                t.live = False


# ----------------------------------------------------------------------------------------- terms and weights

Term = Callable[[float, float, float, Traj, int], tuple[float, float]]
"""(rho, A, log pi, trajectory, position) to (loss, d loss / d log pi)."""


def clip(low: float, high: float) -> Term:
    def term(rho: float, a: float, lp: float, t: Traj, i: int) -> tuple[float, float]:
        bounded = min(max(rho, 1 - low), 1 + high)
        if rho * a <= bounded * a:
            return -rho * a, -rho * a
        return -bounded * a, 0.0

    return term


def plain(rho: float, a: float, lp: float, t: Traj, i: int) -> tuple[float, float]:
    return -rho * a, -rho * a


def score(rho: float, a: float, lp: float, t: Traj, i: int) -> tuple[float, float]:
    return -a * lp, -a


def cispo(rho: float, a: float, lp: float, t: Traj, i: int) -> tuple[float, float]:
    w = min(rho, 1.28)
    return -w * a * lp, -w * a


def sapo(rho: float, a: float, lp: float, t: Traj, i: int) -> tuple[float, float]:
    tau = 1.0 if a > 0 else 1.05
    p = 1 / (1 + math.exp(-tau * (rho - 1)))
    return -4 / tau * p * a, -4 * p * (1 - p) * rho * a


def sao(rho: float, a: float, lp: float, t: Traj, i: int) -> tuple[float, float]:
    w = rho if 0.8 < rho < 1.2 else 0.0
    return -w * a * lp, -w * a


def dynamic(rho: float, a: float, lp: float, t: Traj, i: int) -> tuple[float, float]:
    q = math.exp(t.col["logb_N"][i])
    low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * 0.16 / q, 0))
    high = min(0.5 + 0.5 * math.sqrt(1 + 4 * 0.2 / q), 10)
    return clip(1 - low, high - 1)(rho, a, lp, t, i)


def luffy(rho: float, a: float, lp: float, t: Traj, i: int) -> tuple[float, float]:
    if not t.one["off_policy_S"]:
        return clip(0.2, 0.2)(rho, a, lp, t, i)
    p = math.exp(lp)
    return -p / (p + 0.1) * a, -0.1 * p / (p + 0.1) ** 2 * a


def by_token(t: Traj, i: int) -> float:
    return t.col["live_logp_N"][i] - t.col["logb_N"][i]


def by_sequence(t: Traj, i: int) -> float:
    return fmean(by_token(t, k) for k in range(t.n))


def by_proximal(t: Traj, i: int) -> float:
    return t.col["live_logp_N"][i] - t.col["prox_logp_N"][i]


def by_mixture(t: Traj, i: int) -> float:
    return t.col["live_logp_N"][i] - 0.5 * t.col["logb_N"][i] - 0.5 * t.col["teacher_logp_N"][i]


def now(t: Traj, i: int) -> float:
    return 0.0


Weights = Callable[[list[Traj]], dict[int, float]]


def per_token(ts: list[Traj]) -> dict[int, float]:
    n = sum(t.n for t in ts)
    return {i: 1 / n for t in ts for i in t.at}


def per_sequence(ts: list[Traj]) -> dict[int, float]:
    return {i: 1 / len(ts) / t.n for t in ts for i in t.at}


def summed(ts: list[Traj]) -> dict[int, float]:
    return {i: 1 / len(ts) for t in ts for i in t.at}


def constant(ts: list[Traj]) -> dict[int, float]:
    return {i: 1 / len(ts) / 10 for t in ts for i in t.at}


def per_prompt(ts: list[Traj]) -> dict[int, float]:
    gs = groups(ts)
    return {i: 1 / len(gs) / sum(t.n for t in g) for g in gs for t in g for i in t.at}


# ------------------------------------------------------------------------------------------------- the
# recipes


PPO_TERM = clip(0.2, 0.2)


@dataclass
class Spec:
    """How the reference computes one recipe."""

    adv: Callable[[list[Traj]], None] | None
    term: Term = PPO_TERM
    weights: Weights = per_token
    ratio: Callable[[Traj, int], float] = by_token
    factor: Callable[[list[Traj]], dict[int, float]] | None = None
    extra: tuple[tuple[str, float, str], ...] = ()
    """(term, coefficient, scope)"""
    value: str | None = None


K3 = (("k3", 0.04, "live"),)


def spec_group(f: Callable[[list[float]], list[float]], **more: Any) -> Spec:
    return Spec(lambda ts: flat(ts, f), **more)


def dapo_filter(ts: list[Traj]) -> None:
    wins_only(ts)
    for t in ts:
        t.live = t.live and not t.truncated


def dapo(ts: list[Traj]) -> None:
    dapo_filter(ts)
    flat(ts, z)


def filtered(ts: list[Traj]) -> None:
    wins_only(ts)
    flat(ts, z)


def shaped(r: Callable[[Traj], float]) -> Callable[[list[Traj]], None]:
    return lambda ts: flat(ts, z, r)


def soft(t: Traj) -> float:
    return t.reward + max(-1.0, min(0.0, (5 - 2 - t.n) / 2))


def soft_overlong(ts: list[Traj]) -> None:
    wins_only(ts)
    flat(ts, z, soft)


def length_reward(g: list[Traj], t: Traj) -> float:
    lo, hi = min(x.n for x in g), max(x.n for x in g)
    lam = 0.5 - (t.n - lo) / (hi - lo) if hi > lo else 0.0
    return t.reward + (lam if t.reward > 0.5 else min(0.0, lam))


def kimi(ts: list[Traj]) -> None:
    for g in groups(ts):
        flat(g, z, lambda t, g=g: length_reward(g, t))


def drpo(ts: list[Traj]) -> None:
    for g in groups(ts):
        good = [t for t in g if t.reward > 0.5]
        p = len(good) / len(g)
        total = sum(math.exp(length_reward(g, t)) for t in good)
        for t in g:
            a = (1 - p) * len(good) * math.exp(length_reward(g, t)) / total if t in good else -p
            t.adv = [a] * t.n


def set_value(vectors: list[list[float]]) -> float:
    m = 4096
    grid = [(i + 0.5) / m for i in range(m)]
    return fmean(max(w * a + (1 - w) * b for a, b in vectors) for w in grid)


def vpo(ts: list[Traj]) -> None:
    for g in groups(ts):
        vectors = [t.one["components_SK"] for t in g]
        gain = [set_value(vectors) - set_value(vectors[:i] + vectors[i + 1 :]) for i in range(len(g))]
        table = dict(zip([t.index for t in g], gain, strict=True))
        flat(g, z, lambda t, table=table: table[t.index])


def gapo(ts: list[Traj]) -> None:
    for g in groups(ts):

        def r(t: Traj, g: list[Traj] = g) -> float:
            same = sum(x.one["answer_S"] == t.one["answer_S"] for x in g)
            return t.reward * (1 - (same - 1) / (len(g) - 1))

        flat(g, z, r)


def ngrpo(ts: list[Traj]) -> None:
    for g in groups(ts):
        v = [t.reward for t in g] + [1.0]
        for t in g:
            t.adv = [(t.reward - fmean(v)) / (pstdev(v) + EPS)] * t.n


def risk(ts: list[Traj]) -> None:
    v = sorted(t.reward for t in ts)

    def q(p: float) -> float:
        x = p * (len(v) - 1)
        k = int(x)
        return v[k] + (x - k) * (v[min(k + 1, len(v) - 1)] - v[k])

    lo, hi = q(0.2), q(0.8)
    w = [1.5 / 0.2 * (min(t.reward, lo) - lo) + (min(max(t.reward, lo), hi) - hi) / 0.6 for t in ts]
    for t, x in zip(ts, w, strict=True):
        t.adv = [x - fmean(w)] * t.n


def dcpo(ts: list[Traj]) -> None:
    flat(ts, z)
    for t in ts:
        new = t.adv[0]
        total = (t.reward - t.one["history_mean_S"]) / (t.one["history_std_S"] + EPS)
        i = t.one["history_step_S"]
        a, b = (i - 1) / i * new + total / i, new / i + (i - 1) / i * total
        t.adv = [min(a, b, key=abs)] * t.n


def pods(ts: list[Traj]) -> None:
    for g in groups(ts):
        order = sorted(g, key=lambda t: t.reward)
        keep = [order[0], order[-1]]
        for t in g:
            t.live = t in keep
        flat(keep, z)
        for t in g:
            t.adv = t.adv or [0.0] * t.n


def cppo(ts: list[Traj]) -> None:
    flat(ts, z)
    for g in groups(ts):
        order = sorted(g, key=lambda t: -abs(t.adv[0]))
        for t in order[math.ceil(len(g) / 2) :]:
            t.live = False


def agpo(ts: list[Traj]) -> None:
    filtered(ts)
    if -sum(sum(t.adv) for t in ts if t.live) < 0:
        for t in ts:
            t.adv = [0.0] * t.n


def reinforce_pp(ts: list[Traj], token: Callable[[Traj], list[float]]) -> None:
    scaled(ts, lambda t: to_go(placed(t, token(t))))


def pp_baseline(ts: list[Traj]) -> None:
    flat(ts, centre)
    every = [x for t in ts for x in t.adv]
    for t in ts:
        t.adv = [x / (pstdev(every) + 1e-8) for x in t.adv]


def ppo(ts: list[Traj], **more: Any) -> None:
    critic(ts, lambda t: 0.95, 0.95, **more)
    whiten(ts)


def adaptive(alpha: float) -> Callable[[list[Traj]], None]:
    return lambda ts: critic(ts, lambda t: min(1.0, max(0.0, 1 - 1 / (alpha * t.n))), 1.0)


def evpo(ts: list[Traj]) -> None:
    critic(ts, lambda t: 0.95, 1.0)
    g = [x for t in ts for x in to_go(placed(t))]
    v = [x for t in ts for x in t.col["values_N"]]
    if 1 - pstdev([a - b for a, b in zip(g, v, strict=True)]) ** 2 / pstdev(g) ** 2 <= 0:
        for group in groups(ts):
            for t in group:
                t.adv = [t.reward - fmean(x.reward for x in group)] * t.n


def turns(lam: float) -> Callable[[list[Traj]], None]:
    def run(ts: list[Traj]) -> None:
        for t in ts:
            turn_gae(t, lam)

    return run


def mt_grpo(ts: list[Traj], share: float = 1.0) -> None:
    flat(ts, z)
    for g in groups(ts):
        for t in g:
            own, out = units(t), []
            for k, p in enumerate(own):
                label = t.turns[p[0]]
                peers = [
                    sum(x.col["turn_reward_N"][i] for i in q)
                    for x in g
                    for q in units(x)
                    if x.turns[q[0]] == label
                ]
                mine = sum(t.col["turn_reward_N"][i] for i in p)
                usable = len(peers) >= 2 and max(peers) - min(peers) > 1e-6
                turn = (mine - fmean(peers)) / (pstdev(peers) + EPS) if usable else 0.0
                out.append(t.adv[0] if k == len(own) - 1 else turn + share * t.adv[0])
            t.adv = over_turns(t, out)


def igpo(ts: list[Traj]) -> None:
    for g in groups(ts):
        rewards = {t.index: placed(t, t.col["turn_reward_N"]) for t in g}
        per = {t.index: [sum(rewards[t.index][i] for i in p) for p in units(t)] for t in g}
        every = [x for v in per.values() for x in v]
        for t in g:
            t.adv = over_turns(t, to_go([(x - fmean(every)) / (pstdev(every) + EPS) for x in per[t.index]]))


def traces(ts: list[Traj]) -> None:
    flat(ts, z)
    for t in ts:
        w = [0.99 ** (t.n - 1 - i) for i in range(t.n)]
        t.adv = [a * x / fmean(w) for a, x in zip(t.adv, w, strict=True)]


def gtpo(ts: list[Traj]) -> None:
    dapo_filter(ts)
    for g in groups(ts):
        token: dict[tuple[int, int], float] = {}
        for good in (True, False):
            side = [t for t in g if (t.reward > 0.5) == good]
            for t in side:
                for i in range(t.n):

                    def h(x: Traj, i: int = i, good: bool = good) -> float:
                        return x.col["entropy_N"][i] if good else 1 / x.col["entropy_N"][i]

                    alive = [x for x in side if x.n > i]
                    value = 1.0 + 0.1 * len(alive) * h(t) / sum(h(x) for x in alive)
                    token[t.index, i] = value if good else -value
        m, s = fmean(token.values()), pstdev(token.values())
        for t in g:
            t.adv = [(token[t.index, i] - m) / (s + EPS) for i in range(t.n)]


def nodes(ts: list[Traj]) -> None:
    for t in ts:
        t.adv = list(t.col["node_value_N"])


def gap(t: Traj) -> list[float]:
    return [a - b for a, b in zip(t.col["teacher_logp_N"], t.col["logb_N"], strict=True)]


def rlsd(ts: list[Traj]) -> None:
    flat(ts, z)
    for t in ts:
        sign = (t.adv[0] > 0) - (t.adv[0] < 0)
        t.adv = [a * min(max(math.exp(sign * d), 0.2), 5.0) for a, d in zip(t.adv, gap(t), strict=True)]


def reopold(ts: list[Traj]) -> None:
    for t in ts:
        t.adv = [min(max(d, -2.0), 2.0) for d in gap(t)]


def returns(ts: list[Traj]) -> None:
    for t in ts:
        t.adv = to_go(placed(t))


def greedy(ts: list[Traj]) -> None:
    for t in ts:
        t.adv = [t.reward - t.one["greedy_reward_S"]] * t.n


def prob_weight(ts: list[Traj]) -> dict[int, float]:
    return {i: 0.3 * math.exp(b) + 0.7 for t in ts for i, b in zip(t.at, t.col["logb_N"], strict=True)}


def forks(ts: list[Traj]) -> dict[int, float]:
    every = sorted((h for t in ts for h in t.col["entropy_N"]), reverse=True)
    bound = every[max(1, round(0.2 * len(every))) - 1]
    return {i: float(h >= bound) for t in ts for i, h in zip(t.at, t.col["entropy_N"], strict=True)}


def correction(ts: list[Traj]) -> dict[int, float]:
    return {
        i: min(math.exp(p - b), 2.0)
        for t in ts
        for i, p, b in zip(t.at, t.col["prox_logp_N"], t.col["logb_N"], strict=True)
    }


def multi(t: Traj) -> float:
    a, b = t.one["components_SK"]
    return t.reward + 0.5 * a + 0.25 * b


def n_steps(ts: list[Traj], n: int = 5) -> None:
    for t in ts:
        v, r = t.col["values_N"], placed(t)
        final = t.one["bootstrap_S"] if t.truncated else 0.0
        t.returns = [sum(r[i : i + n]) + (v[i + n] if i + n < t.n else final) for i in range(t.n)]
        t.adv = [g - x for g, x in zip(t.returns, v, strict=True)]


def dast(t: Traj) -> float:
    budget = 2 + (1 - t.one["history_mean_S"]) * 3
    return t.reward + 0.5 * (t.reward > 0.5 and t.n <= budget)


def dagrpo(ts: list[Traj]) -> None:
    flat(ts, z)
    for t in ts:
        t.live = t.live and t.one["density_S"] <= 2.0


GRPO: dict[str, Any] = {"weights": per_sequence}
SPECS: dict[str, Spec] = {
    "reinforce": Spec(returns, score, summed, now),
    "reinforce++": Spec(lambda ts: reinforce_pp(ts, lambda t: kl_tokens(t, 0.01))),
    "reinforce++-baseline": Spec(pp_baseline, extra=(("k2", 0.001, "live"),)),
    "rloo": Spec(lambda ts: flat(ts, loo), score, summed, now),
    "remax": Spec(greedy, score, summed, now),
    "loop": spec_group(loo),
    "ppo": Spec(ppo, value="clipped"),
    "ppo-penalty": Spec(ppo, plain, extra=(("old", 1.0, "live"),), value="clipped"),
    "ppo-turn": Spec(turns(0.95), value="clipped"),
    "rlhf": Spec(lambda ts: ppo(ts, token=lambda t: kl_tokens(t, 0.02)), value="clipped"),
    "vapo": Spec(adaptive(0.05), clip(0.2, 0.28), extra=(("nll", 0.1, "positive"),), value="mse"),
    "sao": Spec(adaptive(1.5), sao, value="mse"),
    "evpo": Spec(evpo, clip(0.2, 0.28), value="mse"),
    "actor-critic": Spec(n_steps, score, ratio=now, value="mse"),
    "sweet-rl": Spec(turns(0.0)),
    "dast": Spec(shaped(dast), **GRPO),
    "dsdr": Spec(
        shaped(lambda t: t.reward / (1 + t.one["density_S"])), extra=(("entropy+", 0.01, "live"),), **GRPO
    ),
    "pro-grpo": Spec(pods, extra=K3, **GRPO),
    "dagrpo": Spec(dagrpo, luffy),
    "prefix-rft": spec_group(z, term=luffy),
    "repo": spec_group(z, ratio=by_proximal, factor=correction, **GRPO),
    "grpo": spec_group(z, extra=K3, **GRPO),
    "dr-grpo": spec_group(centre, weights=constant),
    "dapo": Spec(dapo, clip(0.2, 0.28)),
    "dapo-soft-overlong": Spec(soft_overlong, clip(0.2, 0.28)),
    "gspo": spec_group(z, term=clip(3e-4, 4e-4), ratio=by_sequence, **GRPO),
    "gspo-token": spec_group(z, term=clip(3e-4, 4e-4), ratio=by_sequence, **GRPO),
    "dspo": Spec(filtered, clip(3e-4, 4e-4), per_sequence, by_sequence),
    "cispo": spec_group(z, term=cispo),
    "sapo": spec_group(z, term=sapo, **GRPO),
    "dcpo": Spec(dcpo, dynamic, per_prompt),
    "grpo-decoupled": spec_group(z, ratio=by_proximal, factor=correction, **GRPO),
    "pods": Spec(pods, extra=K3, **GRPO),
    "cppo": Spec(cppo, extra=K3, **GRPO),
    "agpo": Spec(agpo),
    "ngrpo": Spec(ngrpo, clip(0.16, 0.24), **GRPO),
    "lopti": spec_group(z, factor=prob_weight, **GRPO),
    "highent": Spec(dapo, clip(0.2, 0.28), factor=forks),
    "risk-po": Spec(risk, clip(0.2, 0.28)),
    "laser": Spec(shaped(lambda t: t.reward + 0.5 * (t.reward > 0.5 and t.n <= 3)), **GRPO),
    "kimi-length": Spec(kimi, **GRPO),
    "s-grpo": Spec(shaped(lambda t: t.reward / 2 ** t.one["exit_index_S"]), **GRPO),
    "multi-objective": Spec(shaped(multi), **GRPO),
    "drpo": Spec(drpo, **GRPO),
    "vpo": Spec(vpo, **GRPO),
    "swe-rl": spec_group(z, extra=K3, **GRPO),
    "dra-grpo": Spec(shaped(lambda t: t.reward / (1 + t.one["density_S"])), **GRPO),
    "gapo": Spec(gapo, **GRPO),
    "score": Spec(shaped(lambda t: 2 * t.reward - t.one["first_attempt_S"]), extra=K3, **GRPO),
    "prime": Spec(
        lambda ts: reinforce_pp(
            ts,
            lambda t: [0.05 * (a - b) for a, b in zip(t.col["prm_logp_N"], t.col["ref_logp_N"], strict=True)],
        )
    ),
    "r1-zero-div": spec_group(z, extra=(("entropy+", 0.01, "live"),), **GRPO),
    "mt-grpo": Spec(mt_grpo, **GRPO),
    "igpo": Spec(igpo, **GRPO),
    "spo": Spec(turns(0.0)),
    "grpo-vps": Spec(turns(0.0)),
    "scrl": Spec(lambda ts: mt_grpo(ts, 0.0), **GRPO),
    "diver": Spec(shaped(lambda t: t.reward - 0.1 * t.col["potential_N"][0]), **GRPO),
    "treerpo": Spec(nodes),
    "grpo-lambda": Spec(traces, **GRPO),
    "gtpo": Spec(gtpo, clip(0.2, 0.28)),
    "opd": Spec(None, extra=(("teacher", 1.0, "graded"),)),
    "opd-forward": Spec(None, extra=(("teacher-forward", 1.0, "graded"),)),
    "opd-full": Spec(None, extra=(("divergence", 1.0, "graded"),)),
    "kdrl": spec_group(z, extra=(("teacher", 0.002, "graded"),), **GRPO),
    "dgrpo": spec_group(z, extra=(("teacher", 0.05, "live"),), **GRPO),
    "rlad": spec_group(z, ratio=by_mixture, **GRPO),
    "hdpo": spec_group(z, extra=(("divergence", 0.1, "all_fail"),), **GRPO),
    "rlsd": Spec(rlsd, **GRPO),
    "codistill": Spec(shaped(lambda t: t.reward + 0.1 * fmean(gap(t))), **GRPO),
    "reopold": Spec(reopold, plain),
    "luffy": spec_group(z, term=luffy),
    "imitation": Spec(None, extra=(("nll", 1.0, "positive"),)),
}


def _extra(kind: str, t: Traj, i: int) -> tuple[float, float]:
    lp = t.col["live_logp_N"][i]
    if kind in ("k2", "k3"):
        d = lp - t.col["ref_logp_N"][i]
        return (d * d / 2, d) if kind == "k2" else (math.exp(-d) - 1 + d, 1 - math.exp(-d))
    if kind == "old":
        x = lp - t.col["logb_N"][i]
        return math.exp(x) - 1 - x, math.exp(x) - 1
    if kind == "nll":
        return -lp, -1.0
    if kind == "teacher":
        d = lp - t.col["teacher_logp_N"][i]
        return d * d / 2, d
    if kind == "teacher-forward":
        w = min(math.exp(t.col["teacher_logp_N"][i] - lp), 10.0)
        return -w * lp, -w
    if kind == "divergence":
        return t.col["live_teacher_divergence_N"][i], 0.0
    assert kind == "entropy+"
    return (-t.col["live_entropy_N"][i] if t.adv[i] > 0 else 0.0), 0.0


def reference(name: str, columns: Any, live: dict[str, Any]) -> tuple[float, list[float], list[float]]:
    """Loss, gradient with respect to log-probs, gradient with respect to the critic's values."""
    spec = SPECS[name]
    ts = read(columns, live)
    n = columns.layout.n_tokens
    total, by_logp, by_value = 0.0, [0.0] * n, [0.0] * n
    if spec.adv is not None:
        spec.adv(ts)
        inside = [t for t in ts if t.live]
        weights = spec.weights(inside)
        factor = spec.factor(inside) if spec.factor else {}
        for t in inside:
            for i, at in enumerate(t.at):
                rho = math.exp(spec.ratio(t, i))
                value, slope = spec.term(rho, t.adv[i], t.col["live_logp_N"][i], t, i)
                w = weights[at] * factor.get(at, 1.0)
                total += w * value
                by_logp[at] += w * slope
    for kind, coefficient, scope in spec.extra:
        some = {
            "live": [t for t in ts if t.live],
            "graded": ts,
            "positive": [t for t in ts if t.reward > 0.5],
            "all_fail": [t for g in groups(ts) if max(x.reward for x in g) <= 0.5 for t in g],
        }[scope]
        weights = spec.weights(some) if some else {}
        for t in some:
            for i, at in enumerate(t.at):
                value, slope = _extra(kind, t, i)
                total += coefficient * weights[at] * value
                by_logp[at] += coefficient * weights[at] * slope
    if spec.value:
        weights = per_token(ts)
        for t in ts:
            for i, at in enumerate(t.at):
                v, r, old = t.col["live_values_N"][i], t.returns[i], t.col["values_N"][i]
                near = min(max(v, old - 0.2), old + 0.2)
                bounded = spec.value == "clipped" and (near - r) ** 2 > (v - r) ** 2
                total += 0.5 * weights[at] * 0.5 * ((near if bounded else v) - r) ** 2
                by_value[at] += 0.5 * weights[at] * (0.0 if bounded else v - r)
    return total, by_logp, by_value
