"""Jobs, files, and what a run leaves behind."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "files",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("filename", sa.String(512), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("key", sa.String(512), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("files_pkey")),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("training_file", sa.String(64), nullable=False),
        sa.Column("validation_file", sa.String(64)),
        sa.Column("suffix", sa.String(64)),
        sa.Column("fine_tuned_model", sa.String(512), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("fingerprint", sa.String(64)),
        sa.Column("retried", sa.Boolean(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("losses", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(256)),
        sa.Column("rung_at", sa.Double()),
        sa.Column("started_at", sa.Double()),
        sa.Column("heartbeat_at", sa.Double()),
        sa.Column("finished_at", sa.Double()),
        sa.Column("phase", sa.String(32)),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("total_steps", sa.Integer(), nullable=False),
        sa.Column("trained_tokens", sa.BigInteger(), nullable=False),
        sa.Column("estimated_finish", sa.Double()),
        sa.Column("error_code", sa.String(64)),
        sa.Column("error_message", sa.Text()),
        sa.Column("error_param", sa.String(128)),
        sa.CheckConstraint("state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled')", name="jobs_state"),
        sa.PrimaryKeyConstraint("id", name=op.f("jobs_pkey")),
        sa.UniqueConstraint("fine_tuned_model", name=op.f("jobs_fine_tuned_model_key")),
        sa.UniqueConstraint("idempotency_key", name=op.f("jobs_idempotency_key_key")),
    )
    op.create_index("jobs_by_state", "jobs", ["state", "created_at"])
    op.create_index("jobs_by_fingerprint", "jobs", ["fingerprint", "created_at"])
    op.create_table(
        "events",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("level", sa.String(8), nullable=False),
        sa.Column("type", sa.String(16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer()),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("events_job_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("events_pkey")),
    )
    op.create_index("events_by_job", "events", ["job_id", "id"])
    op.create_table(
        "step_metrics",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("values", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("step_metrics_job_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "step", name=op.f("step_metrics_pkey")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(512), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("checkpoints_job_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("checkpoints_pkey")),
    )
    op.create_index("checkpoints_by_job", "checkpoints", ["job_id", "step"], unique=True)


def downgrade() -> None:
    """Drop them."""
    for table in ("checkpoints", "step_metrics", "events", "jobs", "files"):
        op.drop_table(table)
