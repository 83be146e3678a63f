"""`qerl keys create | list | revoke`: on the service's database, whether the service runs or not."""

import argparse
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import select

from app.callers import DEFAULT_OWNER, Scope
from app.db import now, transaction
from app.embedded import StackError, prepare_database
from app.errors import ServiceError
from app.keys import service
from app.keys.models import ApiKey
from app.keys.schemas import OWNER_PATTERN
from app.settings import get_settings

DAY_S = 86_400


def add_keys(commands: Any) -> None:
    """`qerl keys`."""
    keys = commands.add_parser("keys", help="make, list and revoke API keys")
    keys.add_argument("--home", type=Path, help="folder of the database (QERL_HOME; .qerl)")
    actions = keys.add_subparsers(required=True, metavar="ACTION")
    create_ = actions.add_parser("create", help="make a key and print it, this once")
    create_.add_argument("name", metavar="NAME", type=_name, help="what it is for")
    create_.add_argument(
        "--owner", type=_owner, default=DEFAULT_OWNER, help="whose files and jobs it makes and sees (%(default)s)"
    )
    create_.add_argument(
        "--scope", choices=list(Scope), default=Scope.WRITE, type=Scope,
        help="read, write (which includes read) or admin (which includes both, of every owner) (%(default)s)",
    )  # fmt: skip
    create_.add_argument("--expires-days", type=_days, metavar="N", help="days until it stops to work (never)")
    create_.set_defaults(command=_with_database, action=_create)
    list_ = actions.add_parser("list", help="every key, newest first; never the key itself")
    list_.set_defaults(command=_with_database, action=_list)
    revoke_ = actions.add_parser("revoke", help="let a key in no more")
    revoke_.add_argument("id", metavar="ID", help="the id that `list` shows")
    revoke_.set_defaults(command=_with_database, action=_revoke)


def _with_database(arguments: argparse.Namespace) -> int:
    if arguments.home is not None:
        os.environ["QERL_HOME"] = str(arguments.home)
    settings = get_settings()
    settings.home.mkdir(parents=True, exist_ok=True)
    prepare_database(settings.database_url)
    try:
        lines: list[str] = arguments.action(arguments)
    except ServiceError as error:
        raise StackError(error.message) from error
    sys.stdout.write("".join(line + "\n" for line in lines))
    return 0


def _create(arguments: argparse.Namespace) -> list[str]:
    with transaction() as session:
        expires_at = None
        if arguments.expires_days is not None:
            expires_at = session.scalars(select(now())).one() + arguments.expires_days * DAY_S
        text = service.create(
            session, arguments.name, owner=arguments.owner, scope=arguments.scope, expires_at=expires_at
        )[1]
    return [text]


def _list(arguments: argparse.Namespace) -> list[str]:
    with transaction(read_only=True) as session:
        time = session.scalars(select(now())).one()
        keys = session.scalars(select(ApiKey).order_by(ApiKey.id.desc())).all()
    head = ("ID", "KEY", "NAME", "OWNER", "SCOPE", "LAST USED", "STATE")
    rows = [head, *((key.id, f"{key.prefix}...", key.name, key.owner, key.scope, _day(key.last_used_at), _state(key, time)) for key in keys)]  # fmt: skip  # noqa: E501
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _revoke(arguments: argparse.Namespace) -> list[str]:
    with transaction() as session:
        key = service.revoke(session, arguments.id)
    return [f"{key.id} ({key.name}) is revoked"]


def _state(key: ApiKey, time: float) -> str:
    if key.revoked_at is not None:
        return f"revoked {_day(key.revoked_at)}"
    if key.expires_at is None:
        return "valid"
    return f"expire{'d' if key.expires_at <= time else 's'} {_day(key.expires_at)}"


def _day(time: float | None) -> str:
    return "never" if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M")


def _name(text: str) -> str:
    if not 1 <= len(text) <= 128 or not text.isprintable():
        raise argparse.ArgumentTypeError("a name has 1 to 128 printable characters")
    return text


def _owner(text: str) -> str:
    if len(text) > 64 or not re.fullmatch(OWNER_PATTERN, text):
        raise argparse.ArgumentTypeError("an owner has up to 64 letters, digits, dots, dashes and underscores")
    return text


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days <= 36_500:
        raise argparse.ArgumentTypeError("days are a number above 0, up to 36500")
    return days
