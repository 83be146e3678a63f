"""Webhook endpoints, and what is to be delivered to them."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("url", sa.String(2048), nullable=False),
        sa.Column("event_types", sa.JSON(), nullable=False),
        sa.Column("secret", sa.String(128), nullable=False),
        sa.Column("old_secret", sa.String(128)),
        sa.Column("old_secret_until", sa.Double()),
        sa.Column("failing_since", sa.Double()),
        sa.Column("disabled_at", sa.Double()),
        sa.Column("owner", sa.String(64), nullable=False, server_default="default"),
        sa.PrimaryKeyConstraint("id", name=op.f("webhook_endpoints_pkey")),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("endpoint_id", sa.String(64), nullable=False),
        sa.Column("event_id", sa.String(64), nullable=False),
        sa.Column("event_type", sa.String(64), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("next_at", sa.Double()),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("delivered_at", sa.Double()),
        sa.Column("status_code", sa.Integer()),
        sa.Column("error", sa.String(256)),
        sa.Column("owner", sa.String(64), nullable=False, server_default="default"),
        sa.ForeignKeyConstraint(
            ["endpoint_id"], ["webhook_endpoints.id"], name=op.f("webhook_deliveries_endpoint_id_fkey"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("webhook_deliveries_pkey")),
    )  # fmt: skip
    op.create_index("webhook_deliveries_due", "webhook_deliveries", ["next_at"])
    op.create_index("webhook_deliveries_by_endpoint", "webhook_deliveries", ["endpoint_id", "id"])


def downgrade() -> None:
    """Drop them."""
    op.drop_table("webhook_deliveries")
    op.drop_table("webhook_endpoints")
