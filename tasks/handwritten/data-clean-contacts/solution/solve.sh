#!/bin/bash
set -eu
python3 - <<'PY'
import csv
import re

newest = {}
with open("contacts.csv", newline="") as file:
    for row in csv.DictReader(file):
        row["email"] = row["email"].strip().lower()
        if not row["email"] or not re.fullmatch(r"\d{4}-\d{2}-\d{2}", row["updated"]):
            continue
        old = newest.get(row["email"])
        if old is None or row["updated"] > old["updated"]:
            newest[row["email"]] = row
with open("clean.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, ["name", "email", "updated"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(newest[email] for email in sorted(newest))
PY
