"""The deployments over small workers, for a worker's process; `tests/flows/small_context.py` chooses the failures."""

from flows import run
from flows.deployments.retrain import retrain
from flows.deployments.runs import new_run, rerun_stage, train
from flows.deployments.stored import maintain
from tests.flows.small_context import small_context

__all__ = ["maintain", "new_run", "rerun_stage", "retrain", "train"]

run.open_context = small_context
