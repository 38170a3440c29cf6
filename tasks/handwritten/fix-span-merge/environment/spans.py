"""Half-open spans of integers, as `(start, end)` tuples."""


def merge(spans):
    """Disjoint spans that cover the same numbers, sorted."""
    merged = []
    for start, end in spans:
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def covered(spans):
    """How many numbers the spans cover."""
    return sum(end - start for start, end in merge(spans))
