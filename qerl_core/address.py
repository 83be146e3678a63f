"""Requests to addresses that users name, without letting them reach what only this machine reaches.

A host is resolved once, every address it has must be one of the public internet, and the connection goes to the address
that was checked, so a name that changes between (DNS rebinding) gains nothing. Redirects are not followed. Hosts that
an operator lists may be private, and spoken to without TLS; what clouds give their machines' secrets at, never.
"""

import ipaddress
import socket
import ssl
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpcore

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

TIMEOUT_S = 10.0
MAX_BYTES = 64 * 1024
MAX_URL = 2048

METADATA = tuple(
    ipaddress.ip_network(network)
    for network in (
        "169.254.0.0/16", "fe80::/10",  # link-local: AWS, GCP, Azure and most others
        "100.100.100.200/32",  # Alibaba
        "168.63.129.16/32",  # Azure's agent, a public address
        "192.0.0.192/32",  # Oracle
        "fd00:ec2::/32", "fd20:ce::/32",  # AWS, GCP
    )
)  # fmt: skip
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class ForbiddenAddress(ValueError):
    """A URL that must not be asked. The message says why, and never what a private name resolves to."""


class Unreachable(Exception):
    """No answer: nobody listens, TLS failed, or it took too long."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer's status, and as much of its body as was allowed."""

    status: int
    body: bytes


def check_url(url: str, *, private_hosts: Collection[str] = ()) -> None:
    """ForbiddenAddress if a URL can be refused without asking the network: its form, or an address in its text."""
    host, port = _host_and_port(url, private_hosts)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):  # a name: what it stands for is seen when it is asked
        return
    _permit(host, (str(info[4][0]) for info in found), private_hosts)


def post(
    url: str, body: bytes, headers: Mapping[bytes | str, bytes | str], *, private_hosts: Collection[str] = (),
    timeout_s: float = TIMEOUT_S, max_bytes: int = MAX_BYTES,
) -> Reply:  # fmt: skip
    """POST to a URL of a user's. `timeout_s` is for all of it, but for the resolver's own; of the answer's body at
    most `max_bytes` are read. ForbiddenAddress or Unreachable if it was not sent or not answered."""
    host, _ = _host_and_port(url, private_hosts)
    backend = _Pinned(host, private_hosts, time.monotonic() + timeout_s)
    timeouts = {name: timeout_s for name in ("connect", "read", "write", "pool")}
    try:
        with (
            httpcore.ConnectionPool(ssl_context=_tls(), network_backend=backend) as pool,
            pool.stream("POST", url, headers=headers, content=body, extensions={"timeout": timeouts}) as response,
        ):
            read = b""
            for part in response.iter_stream():
                read += part
                if len(read) >= max_bytes:
                    break
            return Reply(response.status, read[:max_bytes])
    except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError) as error:
        raise Unreachable(f"{host} did not answer: {type(error).__name__}") from error


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _host_and_port(url: str, private_hosts: Collection[str]) -> tuple[str, int]:
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise ForbiddenAddress(f"a URL has up to {MAX_URL} printable ASCII characters, without spaces")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower().rstrip("."), parts.port
    except ValueError as error:
        raise ForbiddenAddress("the URL cannot be read") from error
    if not host or parts.scheme not in ("http", "https"):
        raise ForbiddenAddress("the URL must begin with https:// and name a host")
    if parts.username is not None or parts.password is not None:
        raise ForbiddenAddress("the URL must hold no user or password")
    if parts.fragment:
        raise ForbiddenAddress("the URL must hold no fragment")
    if parts.scheme == "http" and host not in _lowered(private_hosts):
        raise ForbiddenAddress("the URL must begin with https://")
    return host, port or (443 if parts.scheme == "https" else 80)


def _lowered(hosts: Collection[str]) -> set[str]:
    return {host.lower().rstrip(".").strip("[]") for host in hosts}


def _permit(host: str, addresses: Iterable[str], private_hosts: Collection[str]) -> list[str]:
    found = list(dict.fromkeys(addresses))
    for text in found:
        for address in _meant(ipaddress.ip_address(text.partition("%")[0])):
            if any(address in network for network in METADATA):
                raise ForbiddenAddress(f"{host} is an address that is never asked")
            public = address.is_global and not address.is_multicast
            if not public and host not in _lowered(private_hosts):
                raise ForbiddenAddress(f"{host} is not on the public internet")
    return found


def _meant(address: Address) -> list[Address]:
    """An address, and the IPv4 ones that are inside it. A mapped one is the IPv4 address and nothing else."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped:
        return [address.ipv4_mapped]
    inner: list[Address] = [address]
    if address.sixtofour:
        inner.append(address.sixtofour)
    if address.teredo:
        inner.extend(address.teredo)
    if address in _NAT64:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    return inner


class _Pinned(httpcore.NetworkBackend):
    """Resolves, checks, and connects to what was checked."""

    def __init__(self, host: str, private_hosts: Collection[str], deadline: float) -> None:
        self._host, self._private_hosts, self._deadline = host, private_hosts, deadline
        self._sockets = httpcore.SyncBackend()

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:  # fmt: skip
        try:
            found = socket.getaddrinfo(self._host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"no address of {self._host} is known") from error
        addresses = _permit(self._host, (str(info[4][0]) for info in found), self._private_hosts)
        failure: Exception = httpcore.ConnectError(f"{self._host} has no address")
        for address in addresses:
            try:
                return _Timed(self._sockets.connect_tcp(address, port, _left(self._deadline)), self._deadline)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


class _Timed(httpcore.NetworkStream):
    """A stream on which all reads and writes together end at a deadline, however slowly bytes come."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._deadline))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Timed(self._stream.start_tls(ssl_context, server_hostname, _left(self._deadline)), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout("out of time")
    return left
