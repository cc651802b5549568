"""Both ends of a connection prove that they know a secret, and get a key; neither sends the secret.

    acceptor  -> connector   greeting, 32 random bytes a
    connector -> acceptor    its name, 32 random bytes c, HMAC(secret, "connector" greeting a c name)
    acceptor  -> connector   HMAC(secret, "acceptor" greeting a c name)

Each proof contains both random numbers, so a replay in another connection fails; the role, so a reflected
proof fails; and the greeting, so a proof of another protocol fails. The connector proves itself first: if its
proof is wrong, the acceptor closes the connection without an answer. HMAC-SHA256 (RFC 2104). This file makes
and reads bytes only; its callers have the sockets.
"""

from __future__ import annotations

import hmac
import secrets

_NONCE_NBYTES = 32
_PROOF_NBYTES = 32


class RefusedError(Exception):
    """The other end does not know the secret, or speaks another protocol."""


class _End:
    """The state of either end: the secret, the greeting and its own random number."""

    def __init__(self, secret: bytes, greeting: bytes) -> None:
        assert b"\0" not in greeting  # in a proof, a zero byte ends the greeting
        self._secret, self._greeting = secret, greeting
        self._nonce = secrets.token_bytes(_NONCE_NBYTES)

    def _proof(self, role: bytes, both: bytes) -> bytes:
        return hmac.digest(self._secret, b"\0".join((role, self._greeting, both)), "sha256")

    def _check(self, proof: bytes, role: bytes, both: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof(role, both)):
            raise RefusedError("it does not know the secret")


class Acceptor(_End):
    """The accepting end: send `hello`, read `need` bytes, give them to `receive`.

    Args:
        secret: the common secret.
        greeting: the protocol and its version; no byte of it is 0.
        name_nbytes: the size of the connector's name.
    """

    def __init__(self, secret: bytes, greeting: bytes, *, name_nbytes: int = 0) -> None:
        super().__init__(secret, greeting)
        self.hello = greeting + self._nonce
        self.need = name_nbytes + _NONCE_NBYTES + _PROOF_NBYTES
        self.name = b""
        self._name_nbytes = name_nbytes

    def receive(self, raw: bytes) -> tuple[bytes, bytes]:
        """The answer to send, and the session's key; sets `name` to the connector's.

        Raises:
            RefusedError: the connector does not know the secret.
        """
        start, proof = raw[:-_PROOF_NBYTES], raw[-_PROOF_NBYTES:]
        name, c = start[: self._name_nbytes], start[self._name_nbytes :]
        both = self._nonce + c + name
        self._check(proof, b"connector", both)
        self.name = name
        return self._proof(b"acceptor", both), self._proof(b"key", both)


class Connector(_End):
    """The end that connects: read `need` bytes, `answer`; read `need_proof`, `check`, which gives the key.

    Args:
        secret, greeting: as of the acceptor.
        name: this end's name.
    """

    need_proof = _PROOF_NBYTES

    def __init__(self, secret: bytes, greeting: bytes, *, name: bytes = b"") -> None:
        super().__init__(secret, greeting)
        self.need = len(greeting) + _NONCE_NBYTES
        self._name = name
        self._both = b""

    def answer(self, hello: bytes) -> bytes:
        """The bytes to send.

        Raises:
            RefusedError: the other end speaks another protocol, or another version of it.
        """
        if not hello.startswith(self._greeting):
            raise RefusedError("it does not speak this version of tutti")
        self._both = hello[len(self._greeting) :] + self._nonce + self._name
        return self._name + self._nonce + self._proof(b"connector", self._both)

    def check(self, proof: bytes) -> bytes:
        """The session's key.

        Raises:
            RefusedError: the acceptor does not know the secret.
        """
        self._check(proof, b"acceptor", self._both)
        return self._proof(b"key", self._both)
