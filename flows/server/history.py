"""Prefect's own record of the past, which grows with every task: what is old is deleted from its database.

Nothing of a run depends on it. Events are deleted by the server itself, after a week unless it is set up otherwise."""

from datetime import datetime
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import TERMINAL_STATES

TAG = "ratchet"  # tag of every deployment of a site, and so of every flow run that is a site's

_AT_ONCE = 50  # as many as the server deletes in one request


def those(**fields: Any) -> FlowRunFilter:
    """A filter of flow runs by its fields, as Prefect's API has them."""
    return FlowRunFilter.model_validate(fields)


def forget_flow_runs(client: SyncPrefectClient, tag: str, before: datetime) -> int:
    """Delete flow runs with that tag which ended before a time, with their subflows, task runs, states and logs; return
    how many, without subflows. Two processes may do this at once, and it may be killed at any time: what is left is
    deleted the next time."""
    ended = {"type": {"any_": sorted(TERMINAL_STATES)}}
    old = those(tags={"all_": [tag]}, state=ended, end_time={"before_": before})
    count = 0
    while found := [one.id for one in client.read_flow_runs(flow_run_filter=old, limit=_AT_ONCE)]:
        # subflows first: once their parent is gone, nothing says whose they are
        while _delete(client, those(parent_flow_run_id={"any_": found})):
            pass
        deleted = _delete(client, those(id={"any_": found}))
        count += deleted
        if not deleted:
            return count  # another process has deleted them
    return count


def _delete(client: SyncPrefectClient, chosen: FlowRunFilter) -> int:
    body = {"flow_runs": chosen.model_dump(mode="json"), "limit": _AT_ONCE}
    return len(client.request("POST", "/flow_runs/bulk_delete", json=body).json()["deleted"])  # pyright: ignore[reportArgumentType]
