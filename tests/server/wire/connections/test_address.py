"""Where a server listens: an address in use is an error at once, but for a server that goes on."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from server.protocol.updaters import Sgd
from server.wire.running import services
from tutti.errors import ServerError


def test_a_server_that_goes_on_waits_for_its_port(tmp_path: Path) -> None:
    """Another process may have taken it meanwhile, such as for a connection of its own."""
    with services(Sgd(), "async", 1, directory=tmp_path) as (first,):
        address = first.address
    port = int(address.rpartition(":")[2])
    other = socket.create_server(("127.0.0.1", port))
    timer = threading.Timer(0.5, other.close)
    timer.start()
    with services(Sgd(), "async", 1, directory=tmp_path, address=address) as (second,):
        assert second.address == address
    timer.join()


def test_a_new_server_does_not_wait(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        timer = threading.Timer(5.0, other.close)  # were it to wait, it would succeed
        timer.start()
        with (
            pytest.raises(ServerError, match="cannot listen"),
            services(Sgd(), "async", 1, directory=tmp_path, address=address),
        ):
            pass
        timer.cancel()
