"""Both ends show that they know the secret, and get a key for the session; neither ever sends it.

    server -> client   "tuti", version, 32 random bytes s
    client -> server   32 random bytes c, HMAC(secret, "client" s c)
    server -> client   HMAC(secret, "server" s c)

Both random numbers are in each proof, so one that was overheard is worth nothing in another connection. A
server that is not convinced closes the connection without a word. HMAC-SHA256 (RFC 2104).
"""

from __future__ import annotations

import hmac
import secrets

_NONCE_NBYTES = 32
_PROOF_NBYTES = 32
_GREETING = b"tuti\x01"


class RefusedError(Exception):
    """The other end does not know the secret, or speaks something else."""


def _proof(secret: bytes, purpose: bytes, s: bytes, c: bytes) -> bytes:
    return hmac.digest(secret, b"tutti " + purpose + b"\0" + s + c, "sha256")


class ServerHandshake:
    """The server's end: send `hello`, read `need` bytes, give them to `receive`."""

    need = _NONCE_NBYTES + _PROOF_NBYTES

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE_NBYTES)
        self.hello = _GREETING + self._nonce

    def receive(self, raw: bytes) -> tuple[bytes, bytes]:
        """The answer to send, and the session's key.

        Raises:
            RefusedError: the client does not know the secret.
        """
        c, proof = raw[:_NONCE_NBYTES], raw[_NONCE_NBYTES:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", self._nonce, c)):
            raise RefusedError("it does not know the secret")
        answer = _proof(self._secret, b"server", self._nonce, c)
        return answer, _proof(self._secret, b"key", self._nonce, c)


class ClientHandshake:
    """The client's end: read `need` bytes, `answer`; read `need_proof`, `check`, which gives the key."""

    need = len(_GREETING) + _NONCE_NBYTES
    need_proof = _PROOF_NBYTES

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE_NBYTES)
        self._server = b""

    def answer(self, hello: bytes) -> bytes:
        """What to send.

        Raises:
            RefusedError: this is no server of tutti, or one of another version.
        """
        if hello[: len(_GREETING)] != _GREETING:
            raise RefusedError("no server of this version of tutti")
        self._server = hello[len(_GREETING) :]
        return self._nonce + _proof(self._secret, b"client", self._server, self._nonce)

    def check(self, proof: bytes) -> bytes:
        """The session's key.

        Raises:
            RefusedError: the server does not know the secret.
        """
        expected = _proof(self._secret, b"server", self._server, self._nonce)
        if not hmac.compare_digest(proof, expected):
            raise RefusedError("the server does not know the secret")
        return _proof(self._secret, b"key", self._server, self._nonce)
