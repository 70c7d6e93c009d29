"""The process of a flow run: `python -m flows.deployments.process`, started by a worker in place of `prefect.engine`.

Prefect's own ends with code 1 when its flow has failed, and the worker reports that as a crash a few seconds later,
even of a Retry that has begun meanwhile. This one ends with code 0 once the server has the flow run's final state.
If the server was away when the flow ended, this process waits until it is back and lets the flow run be tried again,
which only finds what is committed."""

import contextlib
import logging
import os
import runpy
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import httpx

from tasks.config.environment import prepare_process

_AWAY_S = 3600.0
_LOOK_S = 5.0


def main() -> None:
    prepare_process()  # before Prefect is imported
    logging.getLogger("prefect.flow_runs").addFilter(is_ours)
    code, begun = 0, datetime.now(UTC)
    try:
        runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = 0 if not end.code or is_reported(begun) else 1
    from flows.server.temporary import drain

    drain()
    with contextlib.suppress(BrokenPipeError):  # the worker, which reads it, is gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # only threads are left, which would try for minutes to reach a server that is gone


def is_ours(record: logging.LogRecord) -> bool:
    """True for a log line that is not Prefect's own about starting, ending or loading code, nor the traceback with
    which Prefect repeats the state in which a flow ended, after the message that explains it."""
    from prefect.exceptions import CancelledRun, FailedRun, UnfinishedRun

    if "prefect" not in Path(record.pathname).parts:
        return True
    repeated = record.exc_info and isinstance(record.exc_info[1], (CancelledRun, FailedRun, UnfinishedRun))
    return record.levelno >= logging.WARNING and not repeated


def is_reported(begun: datetime) -> bool:
    """True if the server has a final state of the attempt that this process began; another may be under way by now."""
    from prefect.runtime import flow_run

    identity, deadline, away = flow_run.get_id(), time.monotonic() + _AWAY_S, False
    while identity is not None and time.monotonic() < deadline:
        try:
            return _settle(UUID(identity), begun, away)
        except httpx.TransportError:
            away = True
            time.sleep(_LOOK_S)
    return False


def _settle(identity: UUID, begun: datetime, away: bool) -> bool:
    from prefect.client.orchestration import get_client
    from prefect.states import AwaitingRetry

    with get_client(sync_client=True) as client:
        if any(state.is_final() and state.timestamp >= begun for state in client.read_flow_run_states(identity)):
            return True
        if away:
            message = "the server was away when the flow ended; what is committed counts"
            client.set_flow_run_state(identity, AwaitingRetry(message=message), force=True)
    return away


if __name__ == "__main__":
    main()
