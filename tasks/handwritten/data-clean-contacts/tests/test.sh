#!/bin/bash
# Compares data with data; nothing that the policy wrote is executed.
set -eu
mkdir -p /logs/verifier
if [ -f clean.csv ] && [ ! -L clean.csv ] && cmp -s clean.csv /tests/expected.csv \
    && cmp -s contacts.csv /tests/contacts.csv; then
    reward=1
else
    reward=0
fi
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
