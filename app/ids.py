"""Ids that sort by time: a prefix and a UUIDv7."""

from uuid_utils import uuid7


def new_id(prefix: str) -> str:
    """`prefix` and 32 hex digits; later calls sort later."""
    return prefix + uuid7().hex
