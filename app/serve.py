"""The API on a socket that listens already: `python -m app.serve FD`. Whoever bound it knows the port."""

import socket
import sys

import uvicorn

from app import logs
from app.main import create_app

GRACE_S = 5
"""How long open responses, such as a stream of events, may go on at shutdown."""


def main(descriptor: int) -> None:
    """Serve until SIGTERM."""
    logs.setup()
    config = uvicorn.Config(create_app(), log_config=None, access_log=False, timeout_graceful_shutdown=GRACE_S)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    main(int(sys.argv[1]))
