"""Letters between ranks: what arrives, who is lost, and what a malformed one costs."""

from __future__ import annotations

import gc
import os
import random
import socket
import threading
import time

import pytest
import torch

from posts import Desk, desks
from tutti.comm.posts import letters, lines
from tutti.comm.posts.handshake import Acceptor, RefusedError
from tutti.comm.posts.letters import Letter
from tutti.errors import CommError, LayoutError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64]


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    found = {
        str(dtype): (torch.randn(3, i + 1, generator=chance) * 9).to(dtype)
        for i, dtype in enumerate(DTYPES)
    }
    return found | {
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "large": torch.randn(300, 400, generator=chance),
        "seen askew": torch.randn(6, 5, generator=chance).T,
    }


def test_every_letter_arrives_once_in_order_and_whole() -> None:
    one, other = desks(2)
    sent = {i: some_tensors(i) for i in range(20)}
    for i, tensors in sent.items():
        one.post.send(1, f"letter {i}", tensors)
        other.post.send(0, f"back {i}")
    for desk in (one, other):
        desk.wait(lambda desk=desk: len(desk.letters) == 20)
    for i, (rank, letter) in enumerate(other.letters):
        assert rank == 0 and letter.topic == f"letter {i}"
        assert letter.tensors.keys() == sent[i].keys()
        for name, x in sent[i].items():
            assert letter.tensors[name].dtype == x.dtype and torch.equal(letter.tensors[name], x)
    one.post.flush()
    payload = sum(x.nbytes for tensors in sent.values() for x in tensors.values())
    assert payload < one.post.nbytes < payload + 20 * 1200


def test_work_that_a_letter_gives_is_done_without_the_lock_and_may_answer() -> None:
    """Both sides answer large letters with large letters at once: nobody waits for the other to read."""
    pair = desks(2)
    x = {"x": torch.ones(2_000_000)}
    for desk in pair:
        desk.reply = lambda rank, letter, desk=desk: (
            (lambda: desk.post.send(rank, "answer", x)) if letter.topic == "ask" else None
        )
    for _ in range(3):
        for desk in pair:
            desk.post.send(1 - desk.rank, "ask", x)
    for desk in pair:
        desk.wait(lambda desk=desk: sum(y.topic == "answer" for _, y in desk.letters) == 3)


def test_who_ends_is_lost_to_all_after_his_last_letter_and_the_others_go_on() -> None:
    a, b, c = desks(3)
    for to in (0, 1):
        c.post.send(to, "last")
    c.post.flush()
    c.die()
    for desk in (a, b):
        desk.wait(lambda desk=desk: not desk.post.is_here(2))
        assert [letter.topic for _, letter in desk.letters] == ["last"]
        assert "closed" in desk.post.lost[2]
        desk.post.send(2, "to nobody")
        desk.post.flush()
    a.post.send(1, "still here")
    b.wait(lambda: len(b.letters) == 2)


def test_who_leaves_in_good_order_is_not_lost() -> None:
    a, b = desks(2)
    b.post.send(0, "the last thing I say")
    b.post.close()
    a.wait(lambda: not a.post.is_here(1))
    assert a.post.lost == {} and len(a.letters) == 1


def test_a_post_that_nobody_has_any_more_says_goodbye() -> None:
    a, b = desks(2)
    del b
    gc.collect()
    a.wait(lambda: not a.post.is_here(1))
    assert a.post.lost == {}


def test_silence_for_a_lease_is_a_loss_and_who_was_given_up_is_told() -> None:
    one, other = socket.socketpair()
    a = Desk(0, {1: one}, 0.2)
    a.wait(lambda: not a.post.is_here(1))
    assert a.post.lost == {1: "no sign of life for 0.2 s"}
    late = Desk(1, {0: other}, 60.0)  # it goes on, and hears that the others went on without it
    late.wait(lambda: bool(late.post._hub.refused))
    with pytest.raises(CommError, match="have gone on without this one"):
        late.post.check()


def test_signs_of_life_keep_a_busy_rank() -> None:
    a, b = desks(2, lease=1.0)
    while min(a.post.seconds, b.post.seconds) < 2.0:
        time.sleep(0.05)  # neither sends a letter
    assert a.post.is_here(1) and b.post.is_here(0)


@pytest.mark.parametrize(
    "data",
    [
        b"X",
        letters.LETTER + letters.SIZES.pack(2**31, 0),
        letters.LETTER + letters.SIZES.pack(2, 2**62) + b"[]",
        letters.LETTER + letters.SIZES.pack(2, 0) + b"[]",
        letters.LETTER + letters.SIZES.pack(4, 0) + b"null",
        letters.LETTER + letters.SIZES.pack(33, 0) + b'["a", [["x", "float32", [1, 2]]]]',
        letters.LETTER
        + letters.SIZES.pack(33, 8)
        + b'["a", [["x", "object", [1, -2]]]] '
        + bytes(8),
        letters.LETTER + letters.SIZES.pack(7, 8) + b'["", []]'[:7] + bytes(8),
    ],
)
def test_a_malformed_letter_costs_its_sender_the_connection(data: bytes) -> None:
    one, other = socket.socketpair()
    a = Desk(0, {1: one}, None)
    other.sendall(data)
    a.wait(lambda: not a.post.is_here(1))
    assert a.letters == [] and 1 in a.post.lost


def test_random_and_mutated_letters_change_nothing() -> None:
    chance = random.Random(0)
    good = b"".join(letters.to_bytes(Letter("topic", {"x": torch.ones(5)})))
    for _ in range(150):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(1 + letters.SIZES.size, len(data) - 24)] = chance.randrange(256)
        one, other = socket.socketpair()
        a = Desk(0, {1: one}, None)
        other.sendall(data)
        other.shutdown(socket.SHUT_WR)
        a.wait(lambda a=a: not a.post.is_here(1))
        for _, letter in a.letters:  # what is well formed is a letter
            assert all(x.numel() <= 5 for x in letter.tensors.values())
        other.close()  # the post's own end is its threads' to close: its number may be another's by then


def meet(
    secret: bytes, told: bytes, expected: set[int], seconds: float = 1.0
) -> tuple[dict, list[BaseException]]:
    """Rank 1 connects to rank 0, which knows `secret`, with `told`, and is waited for so long."""
    listening, errors = lines._listen(near=True), []

    def come() -> None:
        try:
            lines._connect(0, lines._name(listening), 1, told).close()
        except CommError as error:
            errors.append(error)

    thread = threading.Thread(target=come)
    thread.start()
    try:
        found = lines._accept(listening, expected, secret, time.monotonic() + seconds)
    except CommError as error:
        found = {}
        errors.append(error)
    thread.join()
    listening.close()
    return found, errors


def test_who_knows_the_secret_is_connected_and_who_does_not_is_refused() -> None:
    found, errors = meet(b"secret", b"secret", {1}, 20.0)
    assert list(found) == [1] and not errors
    found, errors = meet(b"secret", b"another", {1})
    assert not found and any("does not accept this rank" in str(e) for e in errors)
    assert any("ranks 1 did not connect" in str(e) for e in errors)


def test_a_rank_that_is_not_expected_and_a_stranger_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, "_HANDSHAKE_SECONDS", 1.0)
    found, errors = meet(b"secret", b"secret", {2})
    assert not found and errors
    listening = lines._listen(near=True)
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(f"\0{lines._name(listening)}")
    stranger.sendall(os.urandom(64))
    with pytest.raises(CommError, match="did not connect"):
        lines._accept(listening, {1}, b"secret", time.monotonic() + 0.3)
    listening.close()


def test_what_a_rank_said_once_is_refused_in_another_connection() -> None:
    """All that a genuine rank sent, again."""
    here, there = socket.socketpair()
    shake = Acceptor(b"secret", lines._GREETING, name_nbytes=4)
    there.sendall(shake.hello)
    connecting = threading.Thread(target=lines._introduce, args=(here, 1, b"secret"))
    connecting.start()
    heard = there.recv(shake.need, socket.MSG_WAITALL)
    answer, _ = shake.receive(heard)
    there.sendall(answer)
    connecting.join(20)
    again, listening = socket.socketpair()
    again.sendall(heard)
    with pytest.raises(RefusedError, match="does not know the secret"):
        lines._greet(listening, {1}, b"secret")


@pytest.mark.parametrize("own", [True, False])
def test_a_rank_refuses_one_that_only_gives_back_what_it_hears(own: bool) -> None:
    """Its own proof, or the answer that another rank of the run gives to it."""
    here, there = socket.socketpair()
    errors: list[BaseException] = []

    def introduce() -> None:
        try:
            lines._introduce(here, 1, b"secret")
        except RefusedError as error:
            errors.append(error)

    connecting = threading.Thread(target=introduce)
    connecting.start()
    shake = Acceptor(b"secret", lines._GREETING, name_nbytes=4)
    there.sendall(lines._GREETING + os.urandom(32))
    heard = there.recv(shake.need, socket.MSG_WAITALL)
    if own:
        there.sendall(heard[-32:])
    else:  # it cannot use another one as its oracle: that one's number is not the one it was given
        with pytest.raises(RefusedError):
            shake.receive(heard)
        there.sendall(bytes(32))
    connecting.join(20)
    assert len(errors) == 1 and "does not know the secret" in str(errors[0])


def test_a_lease_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_LEASE", "soon")
    with pytest.raises(LayoutError, match='TUTTI_LEASE="soon"'):
        desks(2)
