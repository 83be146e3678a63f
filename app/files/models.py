"""The row of an uploaded file."""

from sqlalchemy import BigInteger, String
from sqlalchemy.orm import Mapped, mapped_column

from app.callers import Owned
from app.db import Base, now


class File(Owned, Base):
    """A data set that was checked while it was uploaded: a row exists only for a good one."""

    __tablename__ = "files"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[float] = mapped_column(insert_default=now())
    filename: Mapped[str] = mapped_column(String(512))
    purpose: Mapped[str] = mapped_column(String(32))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    num_rows: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    key: Mapped[str] = mapped_column(String(512))
    """Where the store has it."""
