"""The first schema: runs, evidence in hash chains, training marks, metrics, events, tasks, leased work."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "admissions",
        sa.Column("id", SERIAL, nullable=False),
        sa.Column("task_id", TEXT, nullable=False),
        sa.Column("revision", TEXT, nullable=False),
        sa.Column("valid", sa.Boolean(), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_admissions")),
    )
    op.create_index(
        op.f("ix_admissions_task_id_revision"), "admissions", ["task_id", "revision"], unique=False
    )
    op.create_table(
        "runs",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("algo", TEXT, nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("config_hash", TEXT, nullable=False),
        sa.Column("parent_id", TEXT, nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("seal", TEXT, nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["parent_id"], ["runs.id"], name=op.f("fk_runs_parent_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_table(
        "tasks",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("revision", TEXT, nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("added_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", "revision", name=op.f("pk_tasks")),
    )
    op.create_table(
        "chains",
        sa.Column("run_id", TEXT, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column("head", TEXT, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_chains_run_id")),
        sa.PrimaryKeyConstraint("run_id", "kind", name=op.f("pk_chains")),
    )
    op.create_table(
        "events",
        sa.Column("id", SERIAL, nullable=False),
        sa.Column("run_id", TEXT, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_events_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_run_id_kind"), "events", ["run_id", "kind"], unique=False)
    op.create_table(
        "groups",
        sa.Column("run_id", TEXT, nullable=False),
        sa.Column("id", TEXT, nullable=False),
        sa.Column("task_id", TEXT, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_groups_run_id")),
        sa.PrimaryKeyConstraint("run_id", "id", name=op.f("pk_groups")),
    )
    op.create_table(
        "metrics",
        sa.Column("run_id", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_metrics_run_id")),
        sa.PrimaryKeyConstraint("run_id", "name", "step", name=op.f("pk_metrics")),
    )
    op.create_table(
        "policy_versions",
        sa.Column("run_id", TEXT, nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("parent", sa.BigInteger(), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("location", TEXT, nullable=False),
        sa.Column("content_hash", TEXT, nullable=False),
        sa.Column("config_hash", TEXT, nullable=False),
        sa.Column("published_at", sa.Double(), nullable=False),
        sa.Column("chain", TEXT, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_policy_versions_run_id")),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_policy_versions")),
    )
    op.create_table(
        "updates",
        sa.Column("run_id", TEXT, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("trained_version", sa.BigInteger(), nullable=True),
        sa.Column("published", sa.BigInteger(), nullable=True),
        sa.Column("n_trajectories", sa.BigInteger(), nullable=False),
        sa.Column("content_hash", TEXT, nullable=False),
        sa.Column("chain", TEXT, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_updates_run_id")),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_updates")),
    )
    op.create_table(
        "work",
        sa.Column("id", SERIAL, nullable=False),
        sa.Column("run_id", TEXT, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("key", TEXT, nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("owner", TEXT, nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_work_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_work")),
        sa.UniqueConstraint("run_id", "kind", "key", name=op.f("uq_work_run_id_kind_key")),
    )
    op.create_index(
        op.f("ix_work_run_id_kind_state_id"), "work", ["run_id", "kind", "state", "id"], unique=False
    )
    op.create_table(
        "trajectories",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("run_id", TEXT, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("content_hash", TEXT, nullable=False),
        sa.Column("chain", TEXT, nullable=False),
        sa.Column("blob_hash", TEXT, nullable=False),
        sa.Column("phase", TEXT, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("group_id", TEXT, nullable=False),
        sa.Column("member", sa.BigInteger(), nullable=False),
        sa.Column("task_id", TEXT, nullable=False),
        sa.Column("task_revision", TEXT, nullable=False),
        sa.Column("harness", TEXT, nullable=False),
        sa.Column("split", TEXT, nullable=False),
        sa.Column("termination", TEXT, nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("fault_owner", TEXT, nullable=True),
        sa.Column("fault_code", TEXT, nullable=True),
        sa.Column("n_turns", sa.BigInteger(), nullable=False),
        sa.Column("n_calls", sa.BigInteger(), nullable=False),
        sa.Column("n_tokens", sa.BigInteger(), nullable=False),
        sa.Column("min_version", sa.BigInteger(), nullable=True),
        sa.Column("max_version", sa.BigInteger(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "group_id"],
            ["groups.run_id", "groups.id"],
            name=op.f("fk_trajectories_run_id_group_id"),
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_trajectories_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trajectories")),
        sa.UniqueConstraint("run_id", "seq", name=op.f("uq_trajectories_run_id_seq")),
    )
    op.create_index(
        op.f("ix_trajectories_run_id_group_id"), "trajectories", ["run_id", "group_id"], unique=False
    )
    op.create_index(
        op.f("ix_trajectories_run_id_phase_seq"), "trajectories", ["run_id", "phase", "seq"], unique=False
    )
    op.create_index(op.f("ix_trajectories_task_id"), "trajectories", ["task_id"], unique=False)
    op.create_table(
        "actions",
        sa.Column("trajectory_id", TEXT, nullable=False),
        sa.Column("turn", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tool", TEXT, nullable=False),
        sa.Column("unusable", sa.Integer(), nullable=False),
        sa.Column("failed", sa.Integer(), nullable=True),
        sa.Column("status", TEXT, nullable=True),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name=op.f("fk_actions_trajectory_id")
        ),
        sa.PrimaryKeyConstraint("trajectory_id", "turn", "position", name=op.f("pk_actions")),
    )
    op.create_index(op.f("ix_actions_tool"), "actions", ["tool"], unique=False)
    op.create_table(
        "calls",
        sa.Column("trajectory_id", TEXT, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", TEXT, nullable=False),
        sa.Column("parent_id", TEXT, nullable=True),
        sa.Column("prompt_keep", sa.BigInteger(), nullable=False),
        sa.Column("prompt_hash", TEXT, nullable=False),
        sa.Column("branch_reason", TEXT, nullable=True),
        sa.Column("n_prompt", sa.BigInteger(), nullable=False),
        sa.Column("n_delta", sa.BigInteger(), nullable=False),
        sa.Column("n_generated", sa.BigInteger(), nullable=False),
        sa.Column("prompt_delta", sa.LargeBinary(), nullable=False),
        sa.Column("generation", sa.LargeBinary(), nullable=False),
        sa.Column("log_probs", sa.LargeBinary(), nullable=True),
        sa.Column("log_prob_valid", sa.LargeBinary(), nullable=True),
        sa.Column("log_prob_width", sa.Integer(), nullable=True),
        sa.Column("log_prob_kind", TEXT, nullable=True),
        sa.Column("versions", sa.Text(), nullable=False),
        sa.Column("sampling", sa.Text(), nullable=False),
        sa.Column("finish_reason", TEXT, nullable=False),
        sa.Column("model", TEXT, nullable=False),
        sa.Column("view_hash", TEXT, nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name=op.f("fk_calls_trajectory_id")),
        sa.PrimaryKeyConstraint("trajectory_id", "position", name=op.f("pk_calls")),
    )
    op.create_table(
        "consumed",
        sa.Column("run_id", TEXT, nullable=False),
        sa.Column("trajectory_id", TEXT, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "step"], ["updates.run_id", "updates.step"], name=op.f("fk_consumed_run_id_step")
        ),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name=op.f("fk_consumed_trajectory_id")
        ),
        sa.PrimaryKeyConstraint("run_id", "trajectory_id", name=op.f("pk_consumed")),
    )
    op.create_index(op.f("ix_consumed_run_id_step"), "consumed", ["run_id", "step"], unique=False)
    op.create_index(op.f("ix_consumed_trajectory_id"), "consumed", ["trajectory_id"], unique=False)
    op.create_table(
        "turns",
        sa.Column("trajectory_id", TEXT, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("call_id", TEXT, nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name=op.f("fk_turns_trajectory_id")),
        sa.PrimaryKeyConstraint("trajectory_id", "position", name=op.f("pk_turns")),
    )
    op.create_table(
        "verdicts",
        sa.Column("trajectory_id", TEXT, nullable=False),
        sa.Column("reward", TEXT, nullable=True),
        sa.Column("components", sa.Text(), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("fault", sa.Text(), nullable=True),
        sa.Column("grader_revision", TEXT, nullable=False),
        sa.Column("isolation", TEXT, nullable=False),
        sa.Column("tests", sa.Text(), nullable=False),
        sa.Column("flags", sa.Text(), nullable=False),
        sa.Column("signature", TEXT, nullable=False),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name=op.f("fk_verdicts_trajectory_id")
        ),
        sa.PrimaryKeyConstraint("trajectory_id", name=op.f("pk_verdicts")),
    )
