"""The automation of a site: a flow run that has been silent for long becomes Crashed, wherever its process was.

A worker then tries it again (`flows.site.reconciling`). Two processes never drive one run, whatever the server
believes: a flow run that is declared dead while it lives still holds its run's lease, and the one that is started in
its place waits for it.
"""

from datetime import timedelta

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from flows.site.reconciling import AGAIN
from tasks.config.environment import HEARTBEAT_S

SILENCE_S = 3 * HEARTBEAT_S
"""A flow run is declared dead after this long without a heartbeat."""

_FLOW_RUNS = ResourceSpecification(root={"prefect.resource.id": "prefect.flow-run.*"})
_BEAT = "prefect.flow-run.heartbeat"
_ENDS = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed")}
_AGAIN = {f"prefect.flow-run.{name}" for name in ("AwaitingRetry", "Scheduled", AGAIN)}


def silence(tag: str) -> AutomationCore:
    """The automation for flow runs with that tag."""
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
    return AutomationCore(
        name="ratchet: a flow run whose process is gone is crashed",
        description=f"No heartbeat for {SILENCE_S} s; the process sends one every {HEARTBEAT_S} s.",
        trigger=gone,
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                name="Crashed",
                message=f"its process has been silent for {SILENCE_S} s",
                force=False,
            )
        ],
    )


def keep_automations(client: SyncPrefectClient, tag: str) -> None:
    """Create the automation if it is missing; one that exists is left as it is, changed or paused by a person."""
    wanted = silence(tag)
    if not client.read_automations_by_name(wanted.name):
        client.create_automation(wanted)
