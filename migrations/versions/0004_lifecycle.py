"""Pause, priority, limits and usage of jobs; a job that does another again."""

import sqlalchemy as sa
from alembic import op
from alembic.operations import BatchOperations

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

STATES = ("queued", "running", "succeeded", "failed", "cancelled")


def upgrade() -> None:
    """Add the columns and the state. Jobs that are there have no limits, so `wall_from` is of no account."""
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("retried_from", sa.String(64)))
        jobs.add_column(sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
        jobs.add_column(sa.Column("limits", sa.JSON(), nullable=False, server_default="{}"))
        jobs.add_column(sa.Column("stop_as", sa.String(16)))
        jobs.add_column(sa.Column("stop_reason", sa.Text()))
        jobs.add_column(sa.Column("gpu_seconds", sa.Double(), nullable=False, server_default="0"))
        jobs.add_column(sa.Column("wall_from", sa.Double(), nullable=False, server_default="0"))
        _allow(jobs, *STATES, "paused")
    op.create_index("jobs_by_turn", "jobs", ["state", "priority", "owner", "id"])
    op.create_index("jobs_by_owner_start", "jobs", ["owner", "started_at"])


def downgrade() -> None:
    """Forget them; what is paused is cancelled."""
    jobs_paused = sa.table("jobs", sa.column("state", sa.String))
    op.execute(jobs_paused.update().where(jobs_paused.c.state == "paused").values(state="cancelled"))
    op.drop_index("jobs_by_turn", "jobs")
    op.drop_index("jobs_by_owner_start", "jobs")
    with op.batch_alter_table("jobs") as jobs:
        for name in ("retried_from", "priority", "limits", "stop_as", "stop_reason", "gpu_seconds", "wall_from"):
            jobs.drop_column(name)
        _allow(jobs, *STATES)


def _allow(jobs: BatchOperations, *states: str) -> None:
    allowed = ", ".join(f"'{state}'" for state in states)
    jobs.drop_constraint("jobs_state", type_="check")
    jobs.create_check_constraint("jobs_state", sa.text(f"state IN ({allowed})"))
