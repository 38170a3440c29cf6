"""Build targets and what they need, as `{target: [needed, …]}`."""


def targets(needs):
    """All targets, named or only needed."""
    return sorted({*needs, *(n for needed in needs.values() for n in needed)})
