"""Snapshots that tenants of an environment gateway keep."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "snapshots",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("tenant", TEXT, nullable=False),
        sa.Column("client_key", TEXT, nullable=False),
        sa.Column("body_hash", TEXT, nullable=False),
        sa.Column("session_id", TEXT, nullable=False),
        sa.Column("task_id", TEXT, nullable=False),
        sa.Column("task_revision", TEXT, nullable=False),
        sa.Column("image_digest", TEXT, nullable=False),
        sa.Column("digest", TEXT, nullable=False),
        sa.Column("changes", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("processes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name=op.f("fk_snapshots_tenant")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_snapshots_session_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_snapshots")),
        sa.UniqueConstraint("tenant", "client_key", name=op.f("uq_snapshots_tenant_client_key")),
    )
    op.create_index(op.f("ix_snapshots_expires_at"), "snapshots", ["expires_at"], unique=False)
