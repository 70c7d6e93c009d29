"""How often a flow run that crashed is tried again without a person."""

import itertools
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

    The states of the automation do not count: a server under load may act several times on one crash. Two reports of
    one crash that come at the same moment are both recorded, and count once.
    """
    ordered = sorted(states, key=lambda state: state.timestamp)
    asked = [number for number, state in enumerate(ordered) if state.is_scheduled() and state.name != AGAIN]
    since = ordered[asked[-1] :] if asked else ordered
    return sum(not before.is_crashed() and state.is_crashed() for before, state in itertools.pairwise(since))
