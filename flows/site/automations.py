"""Automations: a flow run whose process is gone becomes Crashed, and a crashed one is tried again.

Two processes never drive one run, whatever the server believes: a flow run that is declared dead while it lives still
holds its run's lease, and the one that is started in its place waits for it.
"""

from datetime import timedelta

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from flows.deployments.crashes import AGAIN
from tasks.config.environment import HEARTBEAT_S

SILENCE_S = 3 * HEARTBEAT_S
"""A flow run is declared dead after this long without a heartbeat."""
QUIET_S = 10
"""A crash is acted on after this long, the shortest that Prefect allows.

A process worker reports each crash of a process twice, as that of the process and as that of its infrastructure, in
either order. As long as the flow run is Crashed the server refuses the second report; if the flow run is under way
again by then, that report makes it Crashed once more, and a second process of it is started.
"""

_FLOW_RUNS = ResourceSpecification(root={"prefect.resource.id": "prefect.flow-run.*"})
_BEAT = "prefect.flow-run.heartbeat"
_SILENT = f"its process has been silent for {SILENCE_S} s"
_KILLED = (
    _SILENT,
    "Flow run process exited with non-zero status code -*",  # by a signal: -9 is also the kernel, out of memory
    "Flow run infrastructure exited with non-zero status code -*",  # the same, if this report was the first
    "Execution was aborted by a termination signal*",  # `ratchet down`, a machine that shuts down
    "Execution was aborted by Python system exit call*",  # the same, if the worker was gone before
)
"""Messages of the crashes that are tried again. A process that ends with an error before its flow begins would do so
again, for ever, since only the flow can count."""
_ASKED_FOR = ("Retry from the UI*", "Retried via CLI*")
"""Messages of the states in which a person lets a flow run continue."""
_ENDS = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed")}
_AGAIN = {f"prefect.flow-run.{name}" for name in ("AwaitingRetry", "Scheduled", AGAIN)}


def automations(tag: str) -> tuple[AutomationCore, ...]:
    """The automations of a site, for flow runs with that tag."""
    tagged = ResourceSpecification(root={"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{tag}"})
    gone = EventTrigger(
        match=_FLOW_RUNS,
        match_related=tagged,
        after={_BEAT},
        expect={_BEAT, *_ENDS, *_AGAIN},  # what continues is watched again from its first heartbeat
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=SILENCE_S),
    )
    crashed = EventTrigger(
        match=ResourceSpecification(root={**_FLOW_RUNS.root, "prefect.state-message": [*_KILLED, *_ASKED_FOR]}),
        match_related=tagged,
        after={"prefect.flow-run.Crashed"},
        expect=_AGAIN,
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=QUIET_S),
    )
    return (
        AutomationCore(
            name="ratchet: a flow run whose process is gone is crashed",
            description=f"No heartbeat for {SILENCE_S} s; the process sends one every {HEARTBEAT_S} s.",
            trigger=gone,
            actions=[_becomes(StateType.CRASHED, "Crashed", _SILENT)],
        ),
        AutomationCore(
            name="ratchet: a flow run whose process was killed is tried again",
            description=f"After {QUIET_S} s, from what is committed. The flow itself limits how often.",
            trigger=crashed,
            actions=[_becomes(StateType.SCHEDULED, AGAIN, "tried again after a crash")],
        ),
    )


def _becomes(state: StateType, name: str, message: str) -> ActionTypes:
    return ChangeFlowRunState(state=state, name=name, message=message, force=False)


def keep_automations(client: SyncPrefectClient, tag: str) -> None:
    """Create the automations that are missing; those that exist are left as they are, changed or paused by a person."""
    for wanted in automations(tag):
        if not client.read_automations_by_name(wanted.name):
            client.create_automation(wanted)
