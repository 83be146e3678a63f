import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from qerl_core import address
from qerl_core.address import ForbiddenAddress, Unreachable, check_url, post


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[tuple[int, list[bytes]]]:
    """A server on loopback that answers one connection as told. Its port, and what it received."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                received.append(connection.recv(65536))
                with suppress(OSError):  # the client has enough
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1], received
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def saying(text: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(text)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0", "10.0.0.1", "192.168.1.1", "172.16.0.1",
        "100.64.0.1", "192.0.2.1", "224.0.0.1", "255.255.255.255", "[::1]", "[::]", "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]", "[fc00::1]", "[2002:7f00:1::]", "[64:ff9b::7f00:1]", "[ff02::1]",
        "169.254.169.254", "[::ffff:169.254.169.254]", "[fe80::1]", "168.63.129.16", "100.100.100.200",
        "[fd00:ec2::254]", "2852039166",
    ],
)  # fmt: skip
def test_no_spelling_of_a_private_address_is_asked(host):
    with pytest.raises(ForbiddenAddress):
        check_url(f"https://{host}/hook")
    with pytest.raises(ForbiddenAddress):
        post(f"https://{host}/hook", b"", {})


@pytest.mark.parametrize("host", ["169.254.169.254", "168.63.129.16", "[fd00:ec2::254]", "[::ffff:169.254.169.254]"])
def test_metadata_addresses_are_never_asked_whatever_the_operator_lists(host):
    for listed in (host, host.strip("[]")):
        with pytest.raises(ForbiddenAddress):
            check_url(f"http://{host}/latest", private_hosts=[listed])


@pytest.mark.parametrize(
    "url",
    [
        "", "example.com", "http://example.com/", "ftp://example.com/", "file:///etc/passwd", "https://",
        "https://user:pass@example.com/", "https://user@example.com/", "https://example.com/#part",
        "https://example.com:99999/", "https://example.com:x/", "https://example.com/a b", "https://[::1/",
        "https://example.com\\@127.0.0.1/", "https://example.com/\r\nx: y", "https://ex\u00e4mple.com/",
        "https://example.com/" + "x" * 2048,
    ],
)  # fmt: skip
def test_a_url_of_another_form_is_refused(url):
    with pytest.raises(ForbiddenAddress):
        check_url(url)


@pytest.mark.parametrize("url", ["https://example.com/a?b=c", "https://8.8.8.8:8443/", "https://[2606:4700::1111]/"])
def test_public_ones_are_not_refused(url):
    check_url(url)


def test_the_address_that_was_checked_is_the_one_connected_to(monkeypatch):
    """DNS rebinding: a second look-up would give another address."""
    asked, connected = [], []

    def resolve(host, port, **options):
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8" if len(asked) == 1 else "127.0.0.1", port))]

    def connect(pair, *rest, **options):
        connected.append(pair[0])
        raise OSError("nobody")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", connect)

    with pytest.raises(Unreachable):
        post("https://rebind.example/", b"", {})

    assert asked == ["rebind.example"]
    assert connected == ["8.8.8.8"]


def test_a_name_with_one_private_address_among_public_ones_is_refused(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 443)) for host in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **options: found)

    with pytest.raises(ForbiddenAddress, match=r"^mixed.example is not on the public internet$"):
        post("https://mixed.example/", b"", {})


def test_a_listed_host_is_asked_without_tls_and_answers():
    with serving(saying(b"HTTP/1.1 202 Accepted\r\ncontent-length: 2\r\n\r\nok")) as (port, received):
        reply = post(f"http://127.0.0.1:{port}/hook", b"{}", {"x-mark": "1"}, private_hosts=["127.0.0.1"])

    assert (reply.status, reply.body) == (202, b"ok")
    assert received[0].startswith(b"POST /hook HTTP/1.1")
    assert b"x-mark: 1" in received[0]


def test_a_redirect_is_an_answer_and_not_followed():
    with serving(saying(b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n")) as (
        port,
        received,
    ):
        reply = post(f"http://localhost:{port}/", b"", {}, private_hosts=["LOCALHOST"])

    assert reply.status == 302
    assert len(received) == 1


def test_of_an_endless_answer_a_part_is_read():
    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b"x" * 4096)

    with serving(endless) as (port, _):
        reply = post(f"http://127.0.0.1:{port}/", b"", {}, private_hosts=["127.0.0.1"])

    assert len(reply.body) == address.MAX_BYTES


def test_an_answer_that_drips_ends_at_the_limit_for_all_of_it():
    def drip(connection: socket.socket) -> None:
        for byte in b"HTTP/1.1 200 OK\r\n" * 100:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    began = time.monotonic()
    with serving(drip) as (port, _), pytest.raises(Unreachable):
        post(f"http://127.0.0.1:{port}/", b"", {}, private_hosts=["127.0.0.1"], timeout_s=0.5)

    assert time.monotonic() - began < 4
