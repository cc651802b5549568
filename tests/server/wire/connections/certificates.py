"""Certificates for tests, made with the `openssl` command: an authority, and what it signs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tutti.server.wire.connections.tls import Tls


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def authority(directory: Path, name: str) -> Path:
    """A certificate that signs others; its key stands beside it."""
    found = directory / f"{name}.pem"
    _openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-days", "2", "-subj", f"/CN={name}", "-keyout", str(directory / f"{name}.key"),
        "-out", str(found))  # fmt: skip
    return found


def signed(directory: Path, by: Path, name: str, *, days: int = 2) -> Tls:
    """A certificate for 127.0.0.1; with `days=-1` its time was over before it was made."""
    stem = directory / name
    key, request, found = (stem.with_suffix(x) for x in (".key", ".csr", ".pem"))
    extension = stem.with_suffix(".ext")
    extension.write_text("subjectAltName=IP:127.0.0.1\n")
    _openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request))  # fmt: skip
    _openssl("x509", "-req", "-in", str(request), "-CA", str(by), "-CAkey",
        str(by.with_suffix(".key")), "-CAcreateserial", "-days", str(days),
        "-extfile", str(extension), "-out", str(found))  # fmt: skip
    return Tls(certificate=found, key=key, authority=by)
