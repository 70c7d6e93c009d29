"""Flow runs that have lost their process, on a real server that notices nothing by itself."""

import asyncio
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, State
from prefect.events.schemas.automations import EventTrigger
from prefect.runner import Runner
from prefect.states import (
    AwaitingRetry,
    Cancelled,
    Cancelling,
    Completed,
    Crashed,
    Failed,
    Paused,
    Pending,
    Running,
    Scheduled,
    Suspended,
)

from flows.site.reconciling import AGAIN, LIMIT, crashes, reconcile, set_right
from flows.site.registration import silence
from flows.site.worker import forget_cancels

POOL = "reconciled"


def history(*states):
    """States in the order of time."""
    return [
        state.model_copy(update={"timestamp": state.timestamp.replace(year=2000 + n)}) for n, state in enumerate(states)
    ]


AUTOMATIC, BY_HAND = Scheduled(name=AGAIN), AwaitingRetry()


@pytest.mark.parametrize(
    ("states", "count"),
    [
        ((Scheduled(), Running()), 0),
        ((Scheduled(), Running(), Crashed(), AUTOMATIC, Running()), 1),
        ((Scheduled(), Running(), Crashed(), AUTOMATIC, AUTOMATIC, AUTOMATIC, Running()), 1),
        ((Scheduled(), Running(), Crashed(), Crashed(), AUTOMATIC, Running()), 1),
        ((Scheduled(), *[Running(), Crashed(), AUTOMATIC] * (LIMIT + 1), Running()), LIMIT + 1),
        ((Scheduled(), *[Running(), Crashed(), AUTOMATIC] * LIMIT, BY_HAND, Running()), 0),
    ],
)
def test_crashes_count_since_a_person_asked(states, count):
    assert crashes(history(*states)) == count
    assert crashes(history(*states)[::-1]) == count


@pytest.mark.parametrize("state", [Completed(), Failed(), Cancelled(), Crashed(), Suspended(), Paused()])
def test_a_flow_run_that_has_ended_or_waits_for_a_person_is_not_declared_dead(state):
    trigger = silence("tag").trigger
    assert isinstance(trigger, EventTrigger)
    assert f"prefect.flow-run.{state.name}" in trigger.expect


def test_a_flow_run_that_was_cancelled_can_be_cancelled_again(monkeypatch: pytest.MonkeyPatch):
    ignored, identity = list[bool](), uuid4()

    async def execute(self: Runner, flow_run_id: UUID) -> None:
        ignored.append(flow_run_id in self._cancelling_flow_run_ids)

    monkeypatch.setattr(Runner, "execute_flow_run", execute)
    forget_cancels()
    runner = Runner()
    runner._cancelling_flow_run_ids.add(identity)
    asyncio.run(runner.execute_flow_run(identity))
    assert ignored == [False]


@flow(persist_result=False)
def nothing() -> None:
    """Never runs here."""


@pytest.fixture
def client(prefect_api: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        yield client
        client.delete_work_pool(POOL)


@pytest.fixture
def asked(client: SyncPrefectClient) -> Iterator[Any]:
    """Ask for a flow run of the pool, and put it through states."""
    made = client.create_deployment(client.create_flow(nothing), "nothing", work_pool_name=POOL, entrypoint="no.where")

    def ask(*states: State) -> FlowRun:
        flow_run = client.create_flow_run_from_deployment(made)
        for state in states:
            client.set_flow_run_state(flow_run.id, state, force=True)
        return client.read_flow_run(flow_run.id)

    yield ask
    client.delete_deployment(made)


def after(client: SyncPrefectClient, flow_run: FlowRun) -> tuple[str, str]:
    state = client.read_flow_run(flow_run.id).state
    assert state is not None
    return state.name or "", state.message or ""


@pytest.mark.parametrize(
    ("code", "alive", "name"),
    [
        ("-9", (), AGAIN),  # killed
        ("137", (), AGAIN),  # in a container
        ("143", None, AGAIN),  # on a cluster, of whose processes this host knows nothing
        ("1", (), AGAIN),  # before the flow began: a limit ends that too
    ],
)
def test_a_crash_is_tried_again_whatever_its_words(client: SyncPrefectClient, asked, code: str, alive, name: str):
    crashed = asked(Running(), Crashed(message=f"Flow run process exited with non-zero status code {code}."))
    client.set_flow_run_state(crashed.id, Crashed(message="Flow run infrastructure exited."))  # reported again
    assert client.read_flow_run(crashed.id).state_id == crashed.state_id
    assert reconcile(client, POOL, alive) == ()  # the second report comes within this time
    assert reconcile(client, POOL, alive, quiet_s=0) == (crashed.name,)
    assert after(client, crashed)[0] == name
    assert reconcile(client, POOL, alive, quiet_s=0) == ()


def test_the_last_of_many_crashes_waits_for_a_person(client: SyncPrefectClient, asked):
    again = (Running(), Crashed(message="killed"), Scheduled(name=AGAIN))
    flow_run = asked(*again * LIMIT, Running(), Crashed(message="killed once more"))
    reconcile(client, POOL, (), quiet_s=0)
    name, message = after(client, flow_run)
    assert name == "Failed"
    assert message.startswith(f"Its process died {LIMIT + 1} times in a row, at last: killed once more")
    client.set_flow_run_state(flow_run.id, AwaitingRetry(message="Retry from the UI"), force=True)
    for state in (Running(), Crashed(message="killed")):
        client.set_flow_run_state(flow_run.id, state, force=True)
    reconcile(client, POOL, (), quiet_s=0)
    assert after(client, flow_run)[0] == AGAIN


def test_what_is_under_way_without_a_process_goes_on_and_nothing_else_is_touched(client: SyncPrefectClient, asked):
    lost, cancelled, submitted = asked(Running()), asked(Running(), Cancelling()), asked(Pending())
    here, done, failed, waiting = asked(Running()), asked(Completed()), asked(Failed()), asked()
    assert reconcile(client, POOL, {str(here.id)}) == ()  # its worker may report it soon
    assert reconcile(client, POOL, None, gone_s=0) == ()
    assert set(reconcile(client, POOL, {str(here.id)}, gone_s=0)) == {lost.name, cancelled.name, submitted.name}
    names = [after(client, one)[0] for one in (lost, cancelled, submitted, here, done, failed, waiting)]
    assert names == ["AwaitingRetry", "Cancelled", "AwaitingRetry", "Running", "Completed", "Failed", "Scheduled"]


def test_a_new_worker_takes_over_crashes_too(client: SyncPrefectClient, asked):
    """A restarted server has forgotten them."""
    crashed = asked(Running(), Crashed(message="Execution was aborted by a termination signal."))
    assert set_right(client, POOL) == (crashed.name,)
    assert after(client, crashed)[0] == AGAIN
