"""Mutual TLS from the standard library: both ends present certificates of one authority."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import ServerError


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Files in PEM form.

    Args:
        certificate: of this process, with the chain to the authority.
        key: its private key.
        authority: the certificates of the other end's issuer.
    """

    certificate: Path
    key: Path
    authority: Path

    def context(self, *, server_side: bool) -> ssl.SSLContext:
        """TLS 1.3 with certificates on both ends; a client also compares the server's name.

        Raises:
            ServerError: a file is missing or invalid.
        """
        purpose = ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(purpose)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as error:
            raise ServerError(
                "the certificates cannot be used",
                at=", ".join(str(x) for x in (self.certificate, self.key, self.authority)),
                why=str(error),
                fix="PEM files of a certificate, its key, and the authority that signed it",
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
        return context
