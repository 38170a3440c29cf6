#!/bin/bash
set -eu
cat >> graph.py <<'PY'


def order(needs):
    """All targets, each after what it needs; the smallest possible one first."""
    missing = {target: set(needs.get(target, ())) for target in targets(needs)}
    users = {target: [] for target in missing}
    for target, needed in missing.items():
        for name in needed:
            users[name].append(target)
    ready = [target for target, needed in missing.items() if not needed]
    heapq.heapify(ready)
    done = []
    while ready:
        target = heapq.heappop(ready)
        done.append(target)
        for user in users[target]:
            missing[user].discard(target)
            if not missing[user]:
                heapq.heappush(ready, user)
    if len(done) < len(missing):
        raise ValueError(f"a circle among {', '.join(sorted(missing.keys() - set(done)))}")
    return done
PY
sed -i '1a\\nimport heapq' graph.py
