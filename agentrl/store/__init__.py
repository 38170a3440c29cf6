"""The evidence store: what happened, provable later. `Store.open(url)` is the door."""

from agentrl.store.rows import (
    AdmissionRow,
    Claim,
    Counts,
    EventRow,
    MetricRow,
    RunRow,
    RunState,
    StalenessRow,
    TrajectoryRow,
    UpdateRow,
    VerifyReport,
)
from agentrl.store.sessions import SessionMove, SessionRow, Superseded, TenantRow
from agentrl.store.snapshots import SnapshotRow, SnapshotsFull
from agentrl.store.store import TRAIN, Store

__all__ = [
    "TRAIN",
    "AdmissionRow",
    "Claim",
    "Counts",
    "EventRow",
    "MetricRow",
    "RunRow",
    "RunState",
    "SessionMove",
    "SessionRow",
    "SnapshotRow",
    "SnapshotsFull",
    "StalenessRow",
    "Store",
    "Superseded",
    "TenantRow",
    "TrajectoryRow",
    "UpdateRow",
    "VerifyReport",
]
