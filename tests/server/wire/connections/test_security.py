"""Who may speak to a server: everybody else is refused, logged, and learns nothing."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from server.protocol.updaters import LR, Sgd, gradient, whole_state
from server.wire.connections import certificates
from server.wire.running import SECRET, client, like, services
from tutti.comm.posts.handshake import Acceptor, Connector
from tutti.errors import CommError, ServerError
from tutti.server.protocol.update import WEIGHT
from tutti.server.wire import service
from tutti.server.wire.connections.address import parsed
from tutti.server.wire.connections.connection import GREETING
from tutti.server.wire.connections.secret import checked_secret
from tutti.server.wire.connections.tls import Tls
from tutti.server.wire.service import Service


@pytest.fixture
def server(caplog: pytest.LogCaptureFixture) -> Iterator[Service]:
    caplog.set_level(logging.INFO, "tutti.server")
    with services(Sgd(), "async", 1) as running:
        yield running[0]
        untouched(running[0])


def untouched(server: Service) -> None:
    """Nothing was applied, and a worker that knows the secret is served."""
    updater, state = Sgd(), whole_state(Sgd())
    assert server.machine.ledger.version == 0 and not server.machine.ledger.members
    with client(updater, "async", [server.address], 0) as one:
        one.join()
        seen = like(updater)
        one.pull(seen)
        assert all(torch.equal(x, state[n][WEIGHT]) for n, x in seen.items())
        assert one.push(gradient(seen, 0, 0), {"lr": LR}).taken


def connect(server: Service) -> socket.socket:
    sock = socket.create_connection(parsed(server.address), timeout=20)
    sock.settimeout(20)
    return sock


def everything(sock: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    found = b""
    try:
        while piece := sock.recv(4096):
            found += piece
    except ConnectionResetError:
        pass
    return found


def test_a_client_that_does_not_know_the_secret(
    server: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        client(Sgd(), "async", [server.address], 0, secret="another secret of sorts") as one,
        pytest.raises(ServerError, match="server 0 refuses this worker"),
    ):
        one.join()
    assert "does not know the secret" in caplog.text


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(64), b"\xff" * 5000])
def test_a_client_without_a_handshake_learns_nothing(
    server: Service, sent: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's random bytes are all that it hears; who is silent is gone after a while."""
    monkeypatch.setattr(service, "_HANDSHAKE_SECONDS", 0.3)
    with connect(server) as sock:
        sock.sendall(sent)
        assert len(everything(sock)) <= len(Acceptor(b"", GREETING).hello)
    assert "closed 127.0.0.1" in caplog.text


class Recorder(threading.Thread):
    """Stands between a client and a server, and keeps what the client sends."""

    def __init__(self, server: Service) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard = b""
        self._server = server

    def run(self) -> None:
        here, _ = self._listener.accept()
        there = connect(self._server)
        back = threading.Thread(target=self._pass, args=(there, here), daemon=True)
        back.start()
        with contextlib.suppress(
            ConnectionResetError
        ):  # the client may leave with an answer unread
            while piece := here.recv(4096):
                self.heard += piece
                there.sendall(piece)
        there.shutdown(socket.SHUT_WR)
        back.join(20)
        for sock in (here, there, self._listener):
            sock.close()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while piece := source.recv(4096):
                sink.sendall(piece)
        except OSError:
            pass


def test_a_replayed_handshake_is_refused(server: Service, caplog: pytest.LogCaptureFixture) -> None:
    """All that a genuine client sent, again: not one byte of it counts."""
    between = Recorder(server)
    between.start()
    with client(Sgd(), "async", [between.address], -1) as one:
        assert one.status()[0].version == 0
    between.join(20)
    assert len(between.heard) > 64 + 128
    with connect(server) as sock:
        hello = len(Acceptor(b"", GREETING).hello)
        sock.sendall(between.heard)
        assert len(everything(sock)) <= hello
    assert "does not know the secret" in caplog.text


def test_a_client_refuses_a_server_that_does_not_know_the_secret() -> None:
    with services(Sgd(), "async", 1, secret="not what the client knows") as running:
        shake = Connector(SECRET.encode(), GREETING)
        with connect(running[0]) as sock:
            sock.sendall(shake.answer(sock.recv(shake.need, socket.MSG_WAITALL)))
            assert everything(sock) == b""


def test_a_client_refuses_a_server_that_only_gives_back_what_it_hears() -> None:
    """An impostor sends the client's own proof as its own; so does one with a proof of its own making."""
    for answer in (lambda heard: heard[-32:], lambda heard: bytes(32)):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            impostor = threading.Thread(target=impersonate, args=(listening, answer), daemon=True)
            impostor.start()
            address = f"127.0.0.1:{listening.getsockname()[1]}"
            with (
                client(Sgd(), "async", [address], 0) as one,
                pytest.raises(ServerError, match="cannot be trusted") as caught,
            ):
                one.join()
            impostor.join(20)
        assert "does not know the secret" in caught.value.why


def impersonate(listening: socket.socket, answer: Callable[[bytes], bytes]) -> None:
    sock, _ = listening.accept()
    with sock:
        shake = Acceptor(b"", GREETING)
        sock.sendall(shake.hello)
        sock.sendall(answer(sock.recv(shake.need, socket.MSG_WAITALL)))
        everything(sock)


@pytest.mark.parametrize("secret", ["", "short"])
def test_a_server_without_a_secret_does_not_start(secret: str) -> None:
    with pytest.raises(ServerError, match="secret") as caught:
        checked_secret(secret, None)
    assert "token_hex" in caught.value.fix


def test_a_server_listens_on_loopback_unless_told_otherwise(server: Service) -> None:
    assert server.address.startswith("127.0.0.1:")


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tls]:
    where = tmp_path_factory.mktemp("certificates")
    ours, other = (certificates.authority(where, n) for n in ("ours", "other"))
    strange = certificates.signed(where, other, "strange")
    return {
        "good": certificates.signed(where, ours, "good"),
        "expired": certificates.signed(where, ours, "expired", days=-1),
        "of another authority": Tls(
            certificate=strange.certificate, key=strange.key, authority=ours
        ),
    }


def test_certificates_alone_are_enough(certified: dict[str, Tls]) -> None:
    tls = certified["good"]
    with (
        services(Sgd(), "async", 1, secret="", tls=tls) as running,
        client(Sgd(), "async", [running[0].address], 0, secret="", tls=tls) as one,
    ):
        one.join()
        seen = like(Sgd())
        one.pull(seen)
        assert one.push(gradient(seen, 0, 0), {"lr": LR}).taken
        assert one.status()[0].version == 1


@pytest.mark.parametrize("what", ["expired", "of another authority"])
def test_a_client_with_a_bad_certificate_is_refused(
    what: str, certified: dict[str, Tls], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tutti.server")
    pytest.raises(ServerError, match="refuses this worker")
    with services(Sgd(), "async", 1, tls=certified["good"]) as running:
        with (
            client(Sgd(), "async", [running[0].address], 0, tls=certified[what]) as one,
            pytest.raises(ServerError, match="refuses this worker"),
        ):
            one.join()
        assert not running[0].machine.ledger.members
    assert "TLS" in caplog.text and "CERTIFICATE" in caplog.text.upper()


@pytest.mark.parametrize("what", ["expired", "of another authority"])
def test_a_server_with_a_bad_certificate_is_refused(what: str, certified: dict[str, Tls]) -> None:
    with (
        services(Sgd(), "async", 1, tls=certified[what]) as running,
        client(Sgd(), "async", [running[0].address], 0, tls=certified["good"]) as one,
        pytest.raises(ServerError, match="certificate verify failed"),
    ):
        one.join()


def test_a_client_without_tls_is_refused(certified: dict[str, Tls]) -> None:
    with services(Sgd(), "async", 1, tls=certified["good"]) as running:
        with (
            client(Sgd(), "async", [running[0].address], 0, timeout_seconds=2.0) as one,
            pytest.raises((ServerError, CommError)),
        ):
            one.join()
        assert not running[0].machine.ledger.members


def test_files_that_are_no_certificates(tmp_path: Path) -> None:
    path = tmp_path / "file.pem"
    path.write_text("nothing")
    for tls in (
        Tls(certificate=path, key=path, authority=path),
        Tls(certificate=tmp_path / "gone", key=path, authority=path),
    ):
        with pytest.raises(ServerError, match="certificates cannot be used"):
            tls.context(server_side=True)


def test_connections_that_hang_do_not_keep_others_out(
    server: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_HANDSHAKE_SECONDS", 0.3)
    socks = [connect(server) for _ in range(service._MOST_STRANGERS + 20)]
    deadline = time.monotonic() + 20
    while server._peers and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not server._peers
    for sock in socks:
        sock.close()
