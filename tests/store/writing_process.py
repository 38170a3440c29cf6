"""A process that writes: `writing_process.py <url> <run> <first> <count> <prefix>`; tells what it did."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from store_records import trajectory

from agentrl.store import Store

if __name__ == "__main__":
    url, run_id, first, count, prefix = sys.argv[1:]
    with Store.open(url) as store:
        for at in range(int(first), int(first) + int(count)):
            added = store.add_trajectory(run_id, trajectory(f"{prefix}{at}", group_id=prefix, index=at))
            print(f"{prefix}{at} {added}", flush=True)
