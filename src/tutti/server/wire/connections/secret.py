"""The secret that workers and servers share."""

from __future__ import annotations

from tutti.errors import ServerError
from tutti.server.wire.connections.tls import Tls

_LEAST_NBYTES = 16


def checked_secret(secret: bytes | str, tls: Tls | None) -> bytes:
    """The secret as bytes.

    Raises:
        ServerError: there is neither a secret nor TLS, or the secret is too short.
    """
    raw = secret.encode() if isinstance(secret, str) else secret
    if len(raw) < _LEAST_NBYTES and not (tls and not raw):
        raise ServerError(
            f"a secret of less than {_LEAST_NBYTES} bytes" if raw else "no secret for the servers",
            why="whoever reaches a server without one could change the weights",
            fix="the same secret for servers and workers (secrets.token_hex(32)), or certificates",
        )
    return raw
