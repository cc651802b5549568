"""Certificates and connections that live: checked when a connection begins, never on one that is open."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from server.protocol.updaters import LR, Sgd, gradient
from server.wire.connections import certificates
from server.wire.running import client, like, services
from tutti.errors import CommError, ServerError
from tutti.server.wire.connections.tls import Tls

LASTS = 4.0  # seconds; certificates count whole ones


def short_lived(directory: Path, by: Path, name: str, seconds: float) -> tuple[Tls, float]:
    """A certificate for 127.0.0.1 that ends in about `seconds`, and when (of the wall clock)."""
    ends = int(time.time() + seconds)
    long = certificates.signed(directory, by, name)
    (directory / f"{name}.index").write_text("")
    (directory / f"{name}.serial").write_text("01\n")
    config = directory / f"{name}.cnf"
    config.write_text(
        f"[ca]\ndefault_ca=own\n[own]\ndatabase={directory}/{name}.index\n"
        f"serial={directory}/{name}.serial\nnew_certs_dir={directory}\ndefault_md=sha256\n"
        "policy=any\nemail_in_dn=no\n[any]\ncommonName=supplied\n"
    )
    found = directory / f"{name}-short.pem"
    dates = [time.strftime("%y%m%d%H%M%SZ", time.gmtime(t)) for t in (ends - 3600, ends)]
    words = [
        "openssl", "ca", "-batch", "-notext", "-config", str(config),
        "-in", str(directory / f"{name}.csr"), "-cert", str(by), "-keyfile", str(by.with_suffix(".key")),
        "-startdate", dates[0], "-enddate", dates[1],
        "-extfile", str(directory / f"{name}.ext"), "-out", str(found),
    ]  # fmt: skip
    subprocess.run(words, check=True, capture_output=True)
    return Tls(certificate=found, key=long.key, authority=by), float(ends)


def test_a_certificate_that_ends_on_a_live_connection(tmp_path: Path) -> None:
    """The connection goes on; a new one is refused by name, and the server keeps what it has."""
    ours = certificates.authority(tmp_path, "ours")
    good = certificates.signed(tmp_path, ours, "good")
    short, ends = short_lived(tmp_path, ours, "brief", LASTS)
    with services(Sgd(), "async", 2, tls=good) as running:
        address = [running[0].address]
        with client(Sgd(), "async", address, 0, tls=short) as one:
            one.join()
            seen = like(Sgd())
            one.pull(seen)
            assert one.push(gradient(seen, 0, 0), {"lr": LR}).taken
            while time.time() < ends + 1.5:
                time.sleep(0.1)
            one.pull(seen)
            assert one.push(gradient(seen, 0, 1), {"lr": LR}).taken
            with (
                client(Sgd(), "async", address, 1, tls=short) as late,
                pytest.raises(ServerError, match="refuses this worker"),
            ):
                late.join()
            assert one.push(gradient(seen, 0, 2), {"lr": LR}).taken
            assert running[0].machine.ledger.version == 3
            assert set(running[0].machine.ledger.members) == {0}


def test_a_server_that_comes_back_with_another_authority(tmp_path: Path) -> None:
    """A worker of the first one does not take it for its server."""
    ours, other = (certificates.authority(tmp_path, name) for name in ("ours", "other"))
    good, foreign = (certificates.signed(tmp_path, by, by.stem + "-one") for by in (ours, other))
    with services(Sgd(), "async", 1, tls=good) as running:
        address = running[0].address
        one = client(Sgd(), "async", [address], 0, tls=good, timeout_seconds=5.0)
        one.join()
        seen = like(Sgd())
        one.pull(seen)
        assert one.push(gradient(seen, 0, 0), {"lr": LR}).taken
    with services(Sgd(), "async", 1, tls=foreign, address=address) as running, one:
        with pytest.raises((ServerError, CommError), match="certificate verify failed"):
            one.push(gradient(seen, 0, 1), {"lr": LR})
        assert not running[0].machine.ledger.members and running[0].machine.ledger.version == 0
