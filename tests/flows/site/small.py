"""The deployments over small workers, for a worker's process; `tests/flows/small_context.py` says what goes wrong."""

from flows import run
from flows.deployments.maintain import maintain
from flows.deployments.new_run import new_run
from flows.deployments.rerun_stage import rerun_stage
from flows.deployments.retrain import retrain
from flows.deployments.train import train
from tests.flows.small_context import small_context

__all__ = ["maintain", "new_run", "rerun_stage", "retrain", "train"]

run.open_context = small_context
