"""API keys, and whose files and jobs are."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table and the owners; what is there belongs to the default one."""
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(8), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("last_used_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.CheckConstraint("scope IN ('read', 'write', 'admin')", name="api_keys_scope"),
        sa.PrimaryKeyConstraint("id", name=op.f("api_keys_pkey")),
        sa.UniqueConstraint("sha256", name=op.f("api_keys_sha256_key")),
    )
    op.create_index("api_keys_by_prefix", "api_keys", ["prefix"])
    op.add_column("files", sa.Column("owner", sa.String(64), nullable=False, server_default="default"))
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("owner", sa.String(64), nullable=False, server_default="default"))
        jobs.drop_constraint("jobs_idempotency_key_key", type_="unique")
        jobs.create_unique_constraint("jobs_idempotency_key_of_owner_key", ["owner", "idempotency_key"])


def downgrade() -> None:
    """Forget whose they are. Where two owners used one idempotency key, only the default owner's job keeps it."""
    jobs_of_others = sa.table("jobs", sa.column("owner", sa.String), sa.column("idempotency_key", sa.String))
    op.execute(jobs_of_others.update().where(jobs_of_others.c.owner != "default").values(idempotency_key=None))
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_constraint("jobs_idempotency_key_of_owner_key", type_="unique")
        jobs.create_unique_constraint("jobs_idempotency_key_key", ["idempotency_key"])
        jobs.drop_column("owner")
    with op.batch_alter_table("files") as files:
        files.drop_column("owner")
    op.drop_table("api_keys")
