#!/bin/bash
set -eu
cat > totals.py <<'PY'
"""Orders as JSON to totals by country and customer as CSV."""

import csv
import json
import sys
from decimal import ROUND_HALF_EVEN, Decimal

with open(sys.argv[1], encoding="utf-8") as file:
    orders = json.load(file, parse_float=Decimal)
totals = {}
for order in orders:
    if order.get("cancelled"):
        continue
    key = (order["customer"]["country"], order["customer"]["name"])
    count, total = totals.get(key, (0, Decimal(0)))
    total += sum((line["count"] * line["price"] for line in order["lines"]), Decimal(0))
    totals[key] = (count + 1, total)
writer = csv.writer(sys.stdout, lineterminator="\n")
writer.writerow(["country", "customer", "orders", "total"])
for (country, name), (count, total) in sorted(totals.items()):
    writer.writerow([country, name, count, total.quantize(Decimal("0.01"), ROUND_HALF_EVEN)])
PY
