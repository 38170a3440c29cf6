"""Whether raters agree: Cohen's kappa for two of them, Krippendorff's alpha for any number and gaps.

1 is agreement always, 0 what chance would give, below 0 worse than chance. Where all ratings are equal,
chance would agree as well and both are undefined; that is given as 1, since nobody disagreed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

Level = Literal["nominal", "interval"]


def cohen_kappa(one: Sequence[float], two: Sequence[float]) -> float:
    """`(p_o - p_e) / (1 - p_e)` of two raters over the same units (Cohen, 1960).

    Raises:
        ValueError: not the same number of ratings, or none.
    """
    if len(one) != len(two) or not one:
        raise ValueError(f"kappa needs two equally long lists, not {len(one)} and {len(two)} ratings")
    n = len(one)
    observed = sum(a == b for a, b in zip(one, two, strict=True)) / n
    first, second = Counter(one), Counter(two)
    chance = sum(first[value] * second[value] for value in first) / n**2
    return 1.0 if chance == 1.0 else (observed - chance) / (1.0 - chance)


_DISTANCES: dict[str, Callable[[float, float], float]] = {
    "nominal": lambda a, b: float(a != b),
    "interval": lambda a, b: (a - b) ** 2,
}


def krippendorff_alpha(ratings: Sequence[Sequence[float | None]], level: Level = "nominal") -> float:
    """`1 - D_o / D_e` over the units that at least two raters rated (Krippendorff, 2011).

    Args:
        ratings: one row per rater, one column per unit; None where a rater gave none.

    Raises:
        ValueError: rows of different length, or no unit with two ratings.
    """
    if len({len(row) for row in ratings}) > 1:
        raise ValueError("every rater must have a column for every unit")
    distance = _DISTANCES[level]
    columns = [[value for value in column if value is not None] for column in zip(*ratings, strict=True)]
    units = [column for column in columns if len(column) > 1]
    if not units:
        raise ValueError("no unit was rated twice")
    total = sum(len(unit) for unit in units)
    observed = sum(
        sum(distance(a, b) for a, b in itertools.permutations(unit, 2)) / (len(unit) - 1) for unit in units
    )
    counts = Counter(value for unit in units for value in unit)
    expected = sum(counts[a] * counts[b] * distance(a, b) for a, b in itertools.permutations(counts, 2)) / (
        total - 1
    )
    return 1.0 if expected == 0.0 else 1.0 - observed / expected
