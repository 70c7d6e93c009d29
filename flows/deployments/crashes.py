"""How often a flow run that crashed is tried again without a person."""

from collections.abc import Sequence
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

AGAIN = "AwaitingRetryAfterCrash"
"""Name of the state by which the site's automation tries a flow run again."""

LIMIT = 3
"""How often, until a person presses Retry."""


def too_many_crashes() -> bool:
    """Whether this flow run was tried again more often than the limit since a person asked for it."""
    identity = flow_run.get_id()
    if identity is None:
        return False
    with get_client(sync_client=True) as client:
        return crashes(client.read_flow_run_states(UUID(identity))) > LIMIT


def crashes(states: Sequence[State]) -> int:
    """Crashes since a person or a schedule asked for the flow run.

    The states of the automation do not count: a server under load may act several times on one crash.
    """
    count = 0
    for state in sorted(states, key=lambda state: state.timestamp, reverse=True):
        if state.is_scheduled() and state.name != AGAIN:
            return count
        count += state.is_crashed()
    return count
