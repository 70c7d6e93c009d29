"""The stages of a run, and what storage must know about them. Sort order is the order of work."""

from enum import StrEnum

from storage.ids import Workflow


class Stage(StrEnum):
    """A step of an iteration whose result is one manifest. The values are stored: they never change."""

    PREPARE = "prepare"
    """Iteration 0 only: model directory and datasets, as parts."""
    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAIN = "train"
    """At iteration 0: the supervised warm-up, which makes the first state."""
    WEIGHT_SYNC = "weight-sync"
    EVALUATE = "evaluate"


WORKFLOW = Workflow(
    prepares=Stage.PREPARE,
    samples=Stage.ROLLOUT,
    scores=Stage.REWARD,
    holds_state=Stage.TRAIN,
    ends_iteration=Stage.WEIGHT_SYNC,
    behind={
        Stage.PREPARE: (Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE),
        Stage.ROLLOUT: (Stage.REWARD, Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE),
        Stage.REWARD: (Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE),
        Stage.TRAIN: (Stage.WEIGHT_SYNC, Stage.EVALUATE),
        Stage.WEIGHT_SYNC: (Stage.EVALUATE,),
        Stage.EVALUATE: (),
    },
)
"""Which stage has which role in storage."""
