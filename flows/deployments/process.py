"""The process of a flow run: `python -m flows.deployments.process`, started by a worker in place of `prefect.engine`.

Prefect's own ends with code 1 when its flow has failed, and the worker reports that as a crash a few seconds later,
even of a Retry that has begun meanwhile. This one ends with code 0 once the server has the flow run's final state.
"""

import os
import runpy
import sys
from datetime import UTC, datetime
from uuid import UUID

import httpx

from tasks.config.environment import prepare_process


def main() -> None:
    """Do the flow run that the environment names."""
    prepare_process()  # before Prefect is imported
    code, begun = 0, datetime.now(UTC)
    try:
        runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = 0 if not end.code or is_reported(begun) else 1
    from flows.server.temporary import drain

    drain()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # only threads are left, which would try for minutes to reach a server that is gone


def is_reported(begun: datetime) -> bool:
    """Whether the server knows how the attempt ended that this process began; another may be under way by now."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.runtime import flow_run

    identity = flow_run.get_id()
    try:
        with get_client(sync_client=True) as client:
            states = [] if identity is None else client.read_flow_run_states(UUID(identity))
    except (httpx.TransportError, PrefectHTTPStatusError):
        return False
    return any(state.is_final() and state.timestamp >= begun for state in states)


if __name__ == "__main__":
    main()
