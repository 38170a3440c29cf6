"""The tables, said once. A run is the root; three hash chains hang from it (trajectories, policy versions,
updates).

Evidence tables (`runs`, `chains`, `groups`, `trajectories`, `calls`, `turns`, `actions`, `verdicts`,
`policy_versions`, `updates`, `consumed`) are only ever inserted into, except for the state of a run and the
head of a chain; `verify` detects anything else. `metrics`, `events`, `tasks`, `admissions` and `work` are
bookkeeping and are not part of a chain; so are `tenants`, `gateways`, `sessions`, `session_log` and
`snapshots`, which an environment gateway writes.

Rules: times are Unix seconds in float64; JSON is canonical text (never a database JSON type, which would
reorder it); binary columns are zstd frames made by `codec`; text compares by code point on every database.
Changing a table means adding a migration: a test compares the migrated schema with this one.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

TEXT = Text().with_variant(Text(collation="C"), "postgresql")
"""Text that sorts and compares by code point, so that prefix ranges mean the same everywhere."""
SERIAL = BigInteger().with_variant(Integer, "sqlite")
"""A row number the database hands out (SQLite counts only in a plain INTEGER)."""

runs = Table(
    "runs",
    metadata,
    Column("id", TEXT, primary_key=True),
    Column("name", TEXT, nullable=False),
    Column("algo", TEXT, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("config", Text, nullable=False),
    Column("config_hash", TEXT, nullable=False),
    Column("parent_id", TEXT, ForeignKey("runs.id")),
    Column("started_at", Double, nullable=False),
    Column("seal", TEXT, nullable=False),
    # Hash of everything above; the first link of each chain of the run.
    Column("state", TEXT, nullable=False),
    Column("finished_at", Double),
)

chains = Table(
    "chains",
    metadata,
    Column("run_id", TEXT, ForeignKey("runs.id"), primary_key=True),
    Column("kind", TEXT, primary_key=True),
    Column("length", BigInteger, nullable=False),
    Column("head", TEXT, nullable=False),
)

groups = Table(
    "groups",
    metadata,
    Column("run_id", TEXT, ForeignKey("runs.id"), primary_key=True),
    Column("id", TEXT, primary_key=True),
    Column("task_id", TEXT, nullable=False),
)

trajectories = Table(
    "trajectories",
    metadata,
    Column("id", TEXT, primary_key=True),
    Column("run_id", TEXT, ForeignKey("runs.id"), nullable=False),
    Column("seq", BigInteger, nullable=False),
    # 1, 2, 3, ... in the order of adding, per run: the order of the chain.
    Column("content_hash", TEXT, nullable=False),
    Column("chain", TEXT, nullable=False),
    Column("blob_hash", TEXT, nullable=False),
    # Over the compressed columns as stored: a changed byte is found even if it decompresses to the same.
    Column("phase", TEXT, nullable=False),
    Column("step", BigInteger),
    Column("group_id", TEXT, nullable=False),
    Column("member", BigInteger, nullable=False),
    Column("task_id", TEXT, nullable=False),
    Column("task_revision", TEXT, nullable=False),
    Column("harness", TEXT, nullable=False),
    Column("split", TEXT, nullable=False),
    Column("termination", TEXT, nullable=False),
    Column("reward", Double),
    Column("fault_owner", TEXT),
    Column("fault_code", TEXT),
    Column("n_turns", BigInteger, nullable=False),
    Column("n_calls", BigInteger, nullable=False),
    Column("n_tokens", BigInteger, nullable=False),
    Column("min_version", BigInteger),
    Column("max_version", BigInteger),
    Column("started_at", Double, nullable=False),
    Column("finished_at", Double, nullable=False),
    Column("metadata", Text, nullable=False),
    ForeignKeyConstraint(["run_id", "group_id"], ["groups.run_id", "groups.id"]),
    UniqueConstraint("run_id", "seq"),
    Index(None, "run_id", "phase", "seq"),
    Index(None, "run_id", "group_id"),
    Index(None, "task_id"),
)

calls = Table(
    "calls",
    metadata,
    Column("trajectory_id", TEXT, ForeignKey("trajectories.id"), primary_key=True),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("id", TEXT, nullable=False),
    Column("parent_id", TEXT),
    Column("prompt_keep", BigInteger, nullable=False),
    Column("prompt_hash", TEXT, nullable=False),
    Column("branch_reason", TEXT),
    Column("n_prompt", BigInteger, nullable=False),
    Column("n_delta", BigInteger, nullable=False),
    Column("n_generated", BigInteger, nullable=False),
    Column("prompt_delta", LargeBinary, nullable=False),
    Column("generation", LargeBinary, nullable=False),
    Column("log_probs", LargeBinary),
    # The known log-probs only, in order. NULL: the call has none.
    Column("log_prob_valid", LargeBinary),
    # Bitmap, first token in the lowest bit. NULL: all are known (or the call has none).
    Column("log_prob_width", Integer),
    # Bytes of one log-prob: 4 (float32, what engines report) or 8 (a value that float32 would have changed).
    Column("log_prob_kind", TEXT),
    Column("versions", Text, nullable=False),
    Column("sampling", Text, nullable=False),
    Column("finish_reason", TEXT, nullable=False),
    Column("model", TEXT, nullable=False),
    Column("view_hash", TEXT, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("finished_at", Double, nullable=False),
)

turns = Table(
    "turns",
    metadata,
    Column("trajectory_id", TEXT, ForeignKey("trajectories.id"), primary_key=True),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("call_id", TEXT, nullable=False),
    Column("body", LargeBinary, nullable=False),
    # Canonical JSON of the turn: actions and observations.
)

actions = Table(
    "actions",
    metadata,
    Column("trajectory_id", TEXT, ForeignKey("trajectories.id"), primary_key=True),
    Column("turn", BigInteger, primary_key=True, autoincrement=False),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("tool", TEXT, nullable=False),
    Column("unusable", Integer, nullable=False),
    # 0 or 1: a boolean column would read a forged 2 as true.
    Column("failed", Integer),
    # The observation is an error. NULL: the action was never answered.
    Column("status", TEXT),
    Index(None, "tool"),
)

verdicts = Table(
    "verdicts",
    metadata,
    Column("trajectory_id", TEXT, ForeignKey("trajectories.id"), primary_key=True),
    Column("reward", TEXT),
    # JSON, because SQLite reads a real of -0.0 back as 0.0; the light row has it as a number.
    Column("components", Text, nullable=False),
    Column("evidence", Text, nullable=False),
    Column("fault", Text),
    Column("grader_revision", TEXT, nullable=False),
    Column("isolation", TEXT, nullable=False),
    Column("tests", Text, nullable=False),
    Column("flags", Text, nullable=False),
    Column("signature", TEXT, nullable=False),
)

policy_versions = Table(
    "policy_versions",
    metadata,
    Column("run_id", TEXT, ForeignKey("runs.id"), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("parent", BigInteger),
    Column("step", BigInteger, nullable=False),
    Column("location", TEXT, nullable=False),
    Column("content_hash", TEXT, nullable=False),
    Column("config_hash", TEXT, nullable=False),
    Column("published_at", Double, nullable=False),
    Column("chain", TEXT, nullable=False),
)

updates = Table(
    "updates",
    metadata,
    Column("run_id", TEXT, ForeignKey("runs.id"), primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("trained_version", BigInteger),
    # The version whose weights the update started from. NULL: the run has published none.
    Column("published", BigInteger),
    Column("n_trajectories", BigInteger, nullable=False),
    Column("content_hash", TEXT, nullable=False),
    Column("chain", TEXT, nullable=False),
)

consumed = Table(
    "consumed",
    metadata,
    Column("run_id", TEXT, primary_key=True),
    Column("trajectory_id", TEXT, ForeignKey("trajectories.id"), primary_key=True),
    Column("step", BigInteger, nullable=False),
    ForeignKeyConstraint(["run_id", "step"], ["updates.run_id", "updates.step"]),
    Index(None, "trajectory_id"),
    Index(None, "run_id", "step"),
)

metrics = Table(
    "metrics",
    metadata,
    Column("run_id", TEXT, ForeignKey("runs.id"), primary_key=True),
    Column("name", TEXT, primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("value", Double),
    # NULL is NaN (SQLite can not hold one); a value that was not measured has no row.
    Column("at", Double, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("id", SERIAL, primary_key=True),
    Column("run_id", TEXT, ForeignKey("runs.id"), nullable=False),
    Column("at", Double, nullable=False),
    Column("kind", TEXT, nullable=False),
    Column("message", Text, nullable=False),
    Column("data", Text, nullable=False),
    Index(None, "run_id", "kind"),
)

tasks = Table(
    "tasks",
    metadata,
    Column("id", TEXT, primary_key=True),
    Column("revision", TEXT, primary_key=True),
    Column("body", Text, nullable=False),
    Column("added_at", Double, nullable=False),
)

admissions = Table(
    "admissions",
    metadata,
    Column("id", SERIAL, primary_key=True),
    Column("task_id", TEXT, nullable=False),
    Column("revision", TEXT, nullable=False),
    Column("valid", Boolean, nullable=False),
    Column("facts", Text, nullable=False),
    Column("at", Double, nullable=False),
    Index(None, "task_id", "revision"),
)

work = Table(
    "work",
    metadata,
    Column("id", SERIAL, primary_key=True),
    Column("run_id", TEXT, ForeignKey("runs.id"), nullable=False),
    Column("kind", TEXT, nullable=False),
    Column("key", TEXT, nullable=False),
    Column("payload", Text, nullable=False),
    Column("state", TEXT, nullable=False),
    Column("owner", TEXT),
    Column("epoch", BigInteger, nullable=False),
    # Number of claims so far: the fencing token of the present one.
    Column("lease_until", Double),
    Column("result", Text),
    UniqueConstraint("run_id", "kind", "key"),
    Index(None, "run_id", "kind", "state", "id"),
)

tenants = Table(
    "tenants",
    metadata,
    Column("name", TEXT, primary_key=True),
    Column("token_hash", TEXT, nullable=False),
    # sha256 of the bearer token: the token itself is nowhere.
    Column("weight", Double, nullable=False),
    Column("max_sessions", BigInteger, nullable=False),
    Column("max_queue", BigInteger, nullable=False),
    Column("added_at", Double, nullable=False),
    UniqueConstraint("token_hash"),
)

gateways = Table(
    "gateways",
    metadata,
    Column("name", TEXT, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    # Number of starts so far: the fencing token of the one that runs.
    Column("started_at", Double, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", TEXT, primary_key=True),
    Column("gateway", TEXT, ForeignKey("gateways.name"), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("tenant", TEXT, ForeignKey("tenants.name"), nullable=False),
    Column("client_key", TEXT, nullable=False),
    Column("body_hash", TEXT, nullable=False),
    Column("body", Text, nullable=False),
    Column("task_id", TEXT, nullable=False),
    Column("task_revision", TEXT, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("state", TEXT, nullable=False),
    Column("lease_epoch", BigInteger, nullable=False),
    Column("lease_until", Double, nullable=False),
    Column("ended_at", Double),
    # NULL: no terminal record yet. Once set, the row never changes.
    Column("verdict", Text),
    UniqueConstraint("tenant", "client_key"),
    Index(None, "gateway", "ended_at"),
)

session_log = Table(
    "session_log",
    metadata,
    Column("session_id", TEXT, ForeignKey("sessions.id"), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("state", TEXT, nullable=False),
    Column("owner", TEXT),
    Column("code", TEXT),
    Column("note", Text, nullable=False),
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("id", TEXT, primary_key=True),
    Column("tenant", TEXT, ForeignKey("tenants.name"), nullable=False),
    Column("client_key", TEXT, nullable=False),
    Column("body_hash", TEXT, nullable=False),
    Column("session_id", TEXT, ForeignKey("sessions.id"), nullable=False),
    Column("task_id", TEXT, nullable=False),
    Column("task_revision", TEXT, nullable=False),
    Column("image_digest", TEXT, nullable=False),
    Column("digest", TEXT, nullable=False),
    Column("changes", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("processes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("body", LargeBinary, nullable=False),
    UniqueConstraint("tenant", "client_key"),
    Index(None, "expires_at"),
)
