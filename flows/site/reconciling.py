"""Reconciliation of flow runs whose process or worker is gone: they are tried again. It reads states and waits for no
event, since a server that is restarted forgets which ones it was waiting for."""

import itertools
from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import WorkPoolFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import AwaitingRetry, Cancelled, Failed, Scheduled

from flows.server.history import those

AGAIN = "AwaitingRetryAfterCrash"  # name of the state in which a flow run is tried again after a crash
LIMIT = 3  # most tries after crashes, until a person presses Retry
QUIET_S = 10.0
"""A crash is acted on after this long.

A process worker reports each crash of a process twice, as that of the process and as that of its infrastructure, in
either order. As long as the flow run is Crashed the server refuses the second report; if the flow run is under way
again by then, that report makes it Crashed once more, and a second process of it is started."""
GONE_S = 60.0
"""A flow run that is under way without a process is acted on after this long: its worker may be about to report it."""

_UNDER_WAY = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)


def crashes(states: Sequence[State]) -> int:
    """Crashes since a person or a schedule asked for the flow run.

    States in which it is tried again do not count: two that look after it may act on one crash. Two reports of one
    crash that come at the same moment are both recorded, and count once."""
    ordered = sorted(states, key=lambda state: state.timestamp)
    asked = [number for number, state in enumerate(ordered) if state.is_scheduled() and state.name != AGAIN]
    since = ordered[asked[-1] :] if asked else ordered
    return sum(not before.is_crashed() and state.is_crashed() for before, state in itertools.pairwise(since))


def set_right(client: SyncPrefectClient, pool: str) -> tuple[str, ...]:
    """Let the flow runs of a pool without a worker continue with the next one, or be cancelled; return their names."""
    return reconcile(client, pool, (), quiet_s=0, gone_s=0)


def reconcile(
    client: SyncPrefectClient,
    pool: str,
    alive: Collection[str] | None,
    quiet_s: float = QUIET_S,
    gone_s: float = GONE_S,
) -> tuple[str, ...]:
    """Try again the flow runs that have crashed, and those under way without a process; return the names of those whose
    state was changed.

    `alive` has the identities of the flow runs that have a process; None if only the server can know that. A crash must
    be `quiet_s` old, and a flow run without a process be under way for `gone_s`."""
    wanted = [StateType.CRASHED] if alive is None else [StateType.CRASHED, *_UNDER_WAY]
    found = client.read_flow_runs(
        flow_run_filter=those(state={"type": {"any_": wanted}}),
        work_pool_filter=WorkPoolFilter.model_validate({"name": {"any_": [pool]}}),
    )
    lost = [one for one in found if str(one.id) not in (alive or ()) and _is_due(one, quiet_s, gone_s)]
    return tuple(one.name for one in lost if _continued(client, one))


def _is_due(flow_run: FlowRun, quiet_s: float, gone_s: float) -> bool:
    state = flow_run.state
    age_s = 0.0 if state is None else (datetime.now(UTC) - state.timestamp).total_seconds()
    return age_s >= (quiet_s if state is not None and state.is_crashed() else gone_s)


def _continued(client: SyncPrefectClient, flow_run: FlowRun) -> bool:
    now = client.read_flow_run(flow_run.id)
    if now.state is None or now.state_id != flow_run.state_id:
        return False  # a person, or another worker, was faster
    # forced: a flow run of a process that is gone cannot object
    client.set_flow_run_state(flow_run.id, _next(client, now, now.state), force=True)
    return True


def _next(client: SyncPrefectClient, flow_run: FlowRun, state: State) -> State[None]:
    if state.is_cancelling():
        return Cancelled(message="its process ended before its worker could cancel it; its run can be continued")
    if not state.is_crashed():
        return AwaitingRetry(message="its process is gone; it continues with what is committed once there is a worker")
    count = crashes(client.read_flow_run_states(flow_run.id))
    if count <= LIMIT:
        return Scheduled(name=AGAIN, message=f"tried again after a crash: {state.message}")
    fact = f"Its process died {count} times in a row, at last: {state.message}"
    return Failed(message=f"{fact}\n\nFind out why, then press Retry, which continues with what is committed.")
