"""Runs a server: captures the step as the workers do, and serves until they have left."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from typing import Any

from torch import Tensor, nn

from tutti.calls.first_call import refuse_where_apart
from tutti.calls.guards import refuse_other_layouts
from tutti.calls.left_to_workers import refuse_where_served
from tutti.capture.batch import with_arguments
from tutti.capture.captured import Captured
from tutti.capture.python.findings import Findings
from tutti.capture.state.first_form import make_slots
from tutti.capture.state.lift import state_of
from tutti.capture.step import capture
from tutti.environment import LEASE, LINGER, LISTEN, RECORDS, REPAIR
from tutti.job import Job
from tutti.launch import roles
from tutti.launch.roles import Role
from tutti.layout import Layout
from tutti.replicas import replica_rows
from tutti.server.protocol import consistency
from tutti.server.protocol.update import WEIGHT
from tutti.server.split.three_parts import split
from tutti.server.split.updater import GraphUpdater
from tutti.server.wire.service import Service
from tutti.serving.left_workers import LeftWorkers
from tutti.state.residence import Residence, run_device, settle, whole_of
from tutti.state.residences import adopt

_LOOK_SECONDS = 0.2


def captured_for(
    job: Job, batch: tuple[Any, ...], findings: Findings | None = None, *, apart: bool
) -> Captured:
    """The step captured on every worker and server: with the rows of one worker if workers are `apart` (each
    push is one update), else with the whole batch. `findings` as for `capture`."""
    model, optimizer, layout = job.model, job.optimizer, job.layout
    refuse_where_apart(optimizer, layout)
    make_slots(optimizer)
    adopt(model, optimizer)
    settle(model, optimizer, Residence(Layout()), run_device(model), job.seed)
    if apart:
        batch = replica_rows.of_batch(batch, 0, layout.num_replicas)
    captured = capture(*job.trained, batch, precision=layout.precision, findings=findings)
    refuse_other_layouts(captured, layout)
    refuse_where_served(captured)
    return captured


def serve(job: Job, role: Role, batch: tuple[Any, ...], num_steps: int) -> None:
    """Serve some of the variables until the workers have left.

    The first weights are those of this process's model, or of its script's checkpoint, after `num_steps`
    steps.
    """
    layout = job.layout
    due = consistency.parse(layout.sync)
    captured = partial(captured_for, job, apart=due.alone(0))
    made = split(with_arguments(captured, job.train_step, job.optimizer, batch))
    updater = GraphUpdater(made)
    service = Service(
        updater,
        whole_state(job.model, job.optimizer, {v.name for v in updater.variables}),
        _address(role),
        consistency=due,
        version=0 if due.alone(0) else num_steps,
        num_workers=layout.num_replicas,
        server=role.number,
        num_servers=layout.server,
        secret=roles.secret(),
        tls=roles.tls(),
        directory=_records(role),
        repair=REPAIR.read(),
        lease_seconds=LEASE.read(),
    )
    roles.publish(role, service.address)
    left = LeftWorkers(role, layout)
    threading.Thread(target=_stop_when_left, args=(service, left), daemon=True).start()
    service.run()
    roles.publish_end(role)


def whole_state(model: nn.Module, optimizer: Any, names: set[str]) -> dict[str, dict[str, Tensor]]:
    """Variables with their slots, whole, by name and slot; all ranks of a worker call together."""
    found: dict[str, dict[str, Tensor]] = {}
    for s in state_of(model, optimizer):
        if (s.owner or s.name) in names:
            own = found.setdefault(s.owner or s.name, {})
            own[s.slot or WEIGHT] = whole_of(s.tensor).cpu()
    return found


def _address(role: Role) -> str:
    """The address to listen at: after a restart the address that the workers know."""
    return LISTEN.read() or roles.published(role) or "127.0.0.1:0"


def _records(role: Role) -> str | None:
    directory = RECORDS.read()
    return os.path.join(directory, str(role).replace(" ", "")) if directory else None


def _stop_when_left(service: Service, told: LeftWorkers) -> None:
    """End a server once no worker is present and the wait for the others is over.

    It has the launcher name the workers without which the others go on.
    """
    linger = LINGER.read()
    alone_since: float | None = None
    while True:
        time.sleep(_LOOK_SECONDS)
        ledger = service.machine.ledger
        told.tell(ledger.missed(), service.lapsed())
        left = ledger.started and not ledger.active()
        now = time.monotonic()
        alone_since = (alone_since or now) if left else None
        if alone_since is not None and now - alone_since >= linger:
            service.stop()
            return
