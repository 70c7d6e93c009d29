"""Flow runs whose worker is gone: they continue when there is one again."""

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import AwaitingRetry, Cancelled

_UNDER_WAY = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


def set_right(client: SyncPrefectClient, pool: str) -> tuple[str, ...]:
    """Let the flow runs of a pool that has no worker continue with the next one; what was to be cancelled is.

    Returns:
        Names of those that continue.
    """
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_UNDER_WAY))),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
    )
    for flow_run in found:
        # forced: a flow run of a process that is gone cannot object
        client.set_flow_run_state(flow_run.id, _next(flow_run), force=True)
    return tuple(one.name for one in found if not _next(one).is_cancelled())


def _next(flow_run: FlowRun) -> State[None]:
    if flow_run.state is not None and flow_run.state.is_cancelling():
        return Cancelled(message="its worker ended before it could be cancelled; its run can be continued")
    return AwaitingRetry(message="its worker ended; it continues with what is committed as soon as there is a worker")
