#!/bin/bash
set -eu
cat > report.py <<'PY'
"""Sales as small text tables."""


def table(sales, key):
    """Amounts by the text of a key, with a total."""
    totals = {}
    for sale in sales:
        name = str(sale[key])
        totals[name] = totals.get(name, 0) + sale["amount"]
    rows = [*sorted(totals.items()), ("total", sum(totals.values()))]
    width = max(len(name) for name, _ in rows)
    digits = max(len(str(amount)) for _, amount in rows)
    return "\n".join([key, *(f"{name:<{width}} {amount:>{digits}}" for name, amount in rows)])


def by_city(sales):
    """Amounts by city."""
    return table(sales, "city")


def by_month(sales):
    """Amounts by month."""
    return table(sales, "month")


def by_product(sales):
    """Amounts by product."""
    return table(sales, "product")
PY
