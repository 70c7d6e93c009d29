"""Records of reruns and choices, as `storage.upkeep.redoing` would write them."""

from datetime import UTC, datetime
from typing import Any

from storage.revisions import Choice, Rerun
from tasks.stages.names import WORKFLOW, Stage

_THEN = datetime(2026, 11, 22, tzinfo=UTC)


def rerun(iteration: int, stage: Stage, revision: int, **more: Any) -> Rerun:
    fields = {
        "parent": 0,
        "behind": WORKFLOW.behind[stage],
        "later": WORKFLOW.leads_on(stage),
        "cascade": True,
        "until": 3,
        "choices": 0,
        "reason": "a test",
        "asked_by": "tests",
        "time": _THEN,
        **more,
    }
    return Rerun.model_validate({"revision": revision, "iteration": iteration, "stage": stage, **fields})


def choice(revision: int, goes_on: int | None = None) -> Choice:
    goes_on = revision if goes_on is None else goes_on
    return Choice(revision=revision, goes_on=goes_on, reason="a test", asked_by="tests", time=_THEN)
