"""Who shows that it knows a secret, and what does not show it."""

from __future__ import annotations

import pytest

from tutti.comm.posts.handshake import Acceptor, Connector, RefusedError

NAME = b"\0\0\0\7"


def ends(
    secret: bytes = b"secret", told: bytes = b"secret", greeting: bytes = b"tuti\1"
) -> tuple[Acceptor, Connector]:
    return Acceptor(secret, b"tuti\1", name_nbytes=4), Connector(told, greeting, name=NAME)


def test_both_ends_agree_on_a_key_that_is_new_each_time_and_on_a_name() -> None:
    keys, seen = set(), set()
    for _ in range(3):
        acceptor, connector = ends()
        assert len(acceptor.hello) == connector.need
        said = connector.answer(acceptor.hello)
        assert len(said) == acceptor.need
        proof, key = acceptor.receive(said)
        assert len(proof) == connector.need_proof
        assert connector.check(proof) == key and acceptor.name == NAME
        keys.add(key)
        seen |= {acceptor.hello, said, proof}
    assert len(keys) == 3 and len(seen) == 9
    assert not any(b"secret" in said or key in said for said in seen for key in keys)


def test_neither_end_trusts_one_with_another_secret() -> None:
    acceptor, connector = ends(told=b"another")
    with pytest.raises(RefusedError, match="does not know the secret"):
        acceptor.receive(connector.answer(acceptor.hello))
    genuine, connector = ends()
    impostor = Acceptor(b"another", b"tuti\1", name_nbytes=4)
    said = connector.answer(impostor.hello)
    for receives in (impostor, genuine):  # one without the secret, and one that is not connected to
        with pytest.raises(RefusedError):
            receives.receive(said)
    with pytest.raises(RefusedError, match="does not know the secret"):
        connector.check(bytes(32))


def test_what_was_overheard_is_worth_nothing_later() -> None:
    acceptor, connector = ends()
    said = connector.answer(acceptor.hello)
    proof, _ = acceptor.receive(said)
    later, other = ends()
    with pytest.raises(RefusedError):
        later.receive(said)
    other.answer(acceptor.hello)  # the same hello again: its own number is new
    with pytest.raises(RefusedError):
        other.check(proof)


def test_a_proof_of_one_end_is_none_of_the_other() -> None:
    """One without the secret gives back what it hears."""
    acceptor, connector = ends()
    said = connector.answer(acceptor.hello)
    with pytest.raises(RefusedError):
        connector.check(said[-32:])
    proof, _ = acceptor.receive(said)
    with pytest.raises(RefusedError):
        acceptor.receive(said[:-32] + proof)


@pytest.mark.parametrize("position", [0, 3, 4, 35, 36, 67])
def test_no_bit_of_what_the_connector_says_can_be_changed(position: int) -> None:
    acceptor, connector = ends()
    said = bytearray(connector.answer(acceptor.hello))
    said[position] ^= 1
    with pytest.raises(RefusedError):
        acceptor.receive(bytes(said))
    assert acceptor.name == b""


def test_another_protocol_or_version_is_refused_by_both() -> None:
    acceptor, connector = ends(greeting=b"tuti\2")
    with pytest.raises(RefusedError, match="this version"):
        connector.answer(acceptor.hello)
    with pytest.raises(RefusedError, match="this version"):
        connector.answer(b"HTTP" * 20)
    with pytest.raises(RefusedError):
        acceptor.receive(connector.answer(b"tuti\2" + acceptor.hello[-32:]))
