"""Tables of the environment gateway: tenants, gateways with their epochs, sessions and their log."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", TEXT, nullable=False),
        sa.Column("token_hash", TEXT, nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("max_sessions", sa.BigInteger(), nullable=False),
        sa.Column("max_queue", sa.BigInteger(), nullable=False),
        sa.Column("added_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_tenants")),
        sa.UniqueConstraint("token_hash", name=op.f("uq_tenants_token_hash")),
    )
    op.create_table(
        "gateways",
        sa.Column("name", TEXT, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_gateways")),
    )
    op.create_table(
        "sessions",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("gateway", TEXT, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("tenant", TEXT, nullable=False),
        sa.Column("client_key", TEXT, nullable=False),
        sa.Column("body_hash", TEXT, nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("task_id", TEXT, nullable=False),
        sa.Column("task_revision", TEXT, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("lease_epoch", sa.BigInteger(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["gateway"], ["gateways.name"], name=op.f("fk_sessions_gateway")),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name=op.f("fk_sessions_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
        sa.UniqueConstraint("tenant", "client_key", name=op.f("uq_sessions_tenant_client_key")),
    )
    op.create_index(op.f("ix_sessions_gateway_ended_at"), "sessions", ["gateway", "ended_at"], unique=False)
    op.create_table(
        "session_log",
        sa.Column("session_id", TEXT, nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("owner", TEXT, nullable=True),
        sa.Column("code", TEXT, nullable=True),
        sa.Column("note", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_session_log_session_id")),
        sa.PrimaryKeyConstraint("session_id", "seq", name=op.f("pk_session_log")),
    )
