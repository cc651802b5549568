"""Servers that are broken on purpose: what is put in the place of `Machine`'s methods."""

from __future__ import annotations

from dataclasses import replace

from tutti.server.protocol.ledger import Record
from tutti.server.protocol.machine import Machine
from tutti.server.protocol.messages import Push, Reply, Request

_PUSH = Machine._push


def forgets_sequences(self: Machine, push: Push) -> Reply:
    """For `_push`: a push that comes twice counts twice."""
    member = self.ledger.members[push.worker]
    self.ledger.members[push.worker] = replace(member, sequence=push.sequence - 1, clock=push.clock)
    return _PUSH(self, push)


def answers_first(self: Machine, record: Record) -> None:
    """For `_decide`: an answered push is not written down."""
    self.ledger.take(record)
    if not isinstance(record, Push):
        self.journal(record)


def fences_nobody(self: Machine, request: Request) -> None:
    """For `_refuse_stranger`: a worker that was replaced may go on."""
