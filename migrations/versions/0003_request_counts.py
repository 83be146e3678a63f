"""How many requests a key has sent in this minute."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "request_counts",
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("minute", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", name=op.f("request_counts_pkey")),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("request_counts")
