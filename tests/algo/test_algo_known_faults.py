"""Every fault that users of other systems met in public has a test of its class.

The ids are the project's; a test names the one it guards in its own name (`test_rat_02_...`) or docstring.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.algorithms
ROOT = Path(__file__).parent.parent

FAULTS = {
    "AGG-01": "the loss depends on the split into micro-batches",
    "AGG-04": "ranks of unequal token counts average their means, or lose a factor of their number",
    "AGG-06": "a masked sample adds a phantom token to the denominator",
    "AGG-08": "the constant of Dr. GRPO is the padded width",
    "AGG-10": "a partial accumulation window is dropped, or normalised by another's count",
    "MSK-02": "the end token is taken for padding",
    "MSK-03": "the mask covers what a template wrote around a generation",
    "MSK-05": "a span that ends at index 0 runs to the end",
    "MSK-06": "a span cut by the length limit is dropped whole",
    "MSK-08": "a NaN at a masked position poisons the loss",
    "MSK-10": "a stop string inside a token parts the text from the ids",
    "MSK-11": "the stop token gets no gradient, or stands there twice",
    "ADV-01": "a group of one yields NaN or its raw reward",
    "ADV-03": "nearly equal rewards are flattened",
    "ADV-04": "ddof differs between two implementations of one method",
    "ADV-05": "float noise becomes a full-size advantage",
    "ADV-08": "a group without spread still counts, without anybody having said so",
    "ADV-10": "ReMax without the whole reward of its greedy rollout",
    "ADV-11": "the overlong penalty starts at another length",
    "GAE-03": "the value at a padding slot follows the last token",
    "GAE-05": "the bootstrap value enters twice",
    "GAE-06": "earlier steps of a trajectory get no advantage",
    "GAE-07": "the length-adaptive lambda is negative, or counts observations",
    "GAE-09": "the immediate reward stands in for the return",
    "KL-01": "an estimator of the KL's value is differentiated as if it were one of its gradient",
    "KL-04": "the KL is in the reward and in the loss",
    "KL-06": "penalty, metric and policy term cover different tokens",
    "RAT-01": "an overflowing ratio becomes NaN",
    "RAT-02": "the clip range or the dual clip is written wrong",
    "RAT-04": "product and mean of a sequence's ratios share a name",
    "RAT-06": "CISPO without its log-prob factor, or with a gradient through its weight",
    "RAT-08": "SAPO without 4/tau, or with one temperature for both signs",
    "RAT-11": "a column of another shape is broadcast",
    "LGP-01": "the temperature is applied on one side only",
    "LGP-04": "the log-prob is that of another entry of the engine's list",
    "LGP-05": "the engine reports 0 for tokens it did not score",
    "LGP-06": "a log-prob that is not finite becomes a number",
    "LGP-10": "the sampled token is outside the learner's own kept set",
    "LGP-11": "an id beyond the tokenizer trains",
    "MDL-02": "small updates vanish in bfloat16",
    "MDL-03": "merging adapters in place moves the base weights",
    "MDL-07": "ranks run different numbers of passes",
    "MDL-08": "tied embeddings come apart",
    "RES-02": "the order after a resume is another one",
    "RES-04": "the optimizer starts anew after a resume",
    "RES-05": "the schedule counts batches instead of optimizer steps",
    "RES-06": "padding duplicates are counted, or the tail is dropped",
    "MET-03": "a sentinel makes the entropy negative",
    "MET-05": "an entropy bonus without gradient",
    "MET-07": "the ratio is reported after it was truncated",
    "MET-08": "the log-softmax of the whole vocabulary is kept",
    "TOK-01": "sampled ids are decoded and encoded again",
    "TOK-04": "a template that drops reasoning is taken for one that appends",
    "TOK-07": "arguments on the wire are encoded twice, or written otherwise than sampled",
    "TOK-08": "BOS stands there twice",
    "TOK-11": "a reply that comes back without its reasoning stops training",
    "TOK-13": "decoding cleans up, or ids do not survive a round trip",
    "TOK-15": "a control string in content becomes the control token",
    "TOK-16": "a character split over tokens is counted twice",
    "TOK-17": "the generation prompt is missing from the second turn on",
    "SRV-01": "log-probs vanish from a stream with a parser",
    "SRV-04": "a proxy drops the ids, and the run looks fine",
    "SRV-06": "a malformed call kills the attempt or leaves an orphan",
    "SRV-09": "a resumed generation asks for the whole budget again",
    "SRV-10": "log-probs in another form of object are ignored",
    "SRV-12": "the first choice that ends ends all",
    "SRV-13": "only the first call has its prompt",
    "TRJ-02": "every group has one member",
    "TRJ-04": "a forked prefix trains several times",
    "TRJ-05": "a rollout weighs by its number of rows",
    "ASY-02": "a bound of n admits n + 1 versions",
    "ASY-04": "publishing a version aborts what is in flight",
    "ASY-06": "weights change while asleep or under a running step",
    "ASY-07": "generation stays paused after an update",
    "ASY-08": "staleness is measured at different moments",
    "ASY-10": "stale tokens stay in the denominator",
    "ENV-02": "a timeout is read as done, or skips grading",
    "ENV-03": "a sandbox that never starts hangs or leaks",
    "ENV-07": "the agent writes its own reward",
    "ENV-08": "a submission is missed behind noise",
    "ENV-09": "a log decides the reward",
    "ENV-10": "a verifier that could not start says 0",
    "ENV-11": "dynamic sampling never ends",
}
"""Id to what went wrong elsewhere."""


@cache
def guarded() -> dict[str, list[str]]:
    """Fault id to the tests that name it."""
    found: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                words = f"{node.name.replace('_', '-')} {ast.get_docstring(node) or ''}".upper()
                for word in re.findall(r"\b[A-Z]{2,3}-\d\d\b", words):
                    found.setdefault(word, []).append(f"{path.name}::{node.name}")
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_every_known_fault_is_named_by_a_test(fault: str) -> None:
    assert guarded().get(fault), FAULTS[fault]


def test_no_test_names_a_fault_of_these_families_that_is_not_in_the_table() -> None:
    families = {name.split("-")[0] for name in FAULTS}
    assert {f for f in guarded() if f.split("-")[0] in families} <= set(FAULTS)
