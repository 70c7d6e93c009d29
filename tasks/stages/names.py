"""The stages of a run, and what storage must know about them. Sort order is the order of work."""

from dataclasses import replace
from enum import StrEnum
from functools import partial

from storage.ids import Workflow
from tasks.config.identity import touches


class Stage(StrEnum):
    """A step of an iteration whose result is one manifest. The values are stored: they never change."""

    PREPARE = "prepare"  # iteration 0 only: model directory and datasets, as parts
    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAIN = "train"  # at iteration 0: the supervised warm-up, which makes the first state
    WEIGHT_SYNC = "weight-sync"
    EVALUATE = "evaluate"
    SELECT = "select"  # iteration 0 of a run that trains on stored samples: which those are
    RESCORE = "rescore"  # iteration 0 of such a run, if asked for: new scores of the selected samples


PREPARATION = (Stage.PREPARE, Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE)
ITERATION = (Stage.ROLLOUT, Stage.REWARD, Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE)
"""Stages of iteration 0, in their order, and of every other; the `train` of iteration 0 is the supervised warm-up."""
LOOP = (Stage.PREPARE, *ITERATION)
"""The stages of a run that samples for itself."""

WORKFLOW = Workflow(
    prepares=Stage.PREPARE,
    samples=Stage.ROLLOUT,
    scores=Stage.REWARD,
    holds_state=Stage.TRAIN,
    ends_iteration=Stage.WEIGHT_SYNC,
    selects=Stage.SELECT,
    behind={Stage.PREPARE: LOOP[3:], **{stage: LOOP[after:] for after, stage in enumerate(LOOP[1:], 2)}},
    decides_state=partial(touches, stage=Stage.TRAIN),
    preparation=PREPARATION,
    iteration=ITERATION,
    optional=(Stage.REWARD, Stage.RESCORE),
)  # roles of the stages in storage

RETRAINING = replace(
    WORKFLOW,
    ends_iteration=Stage.TRAIN,
    preparation=(Stage.PREPARE, Stage.TRAIN, Stage.SELECT, Stage.RESCORE),
    iteration=(Stage.TRAIN,),
)
"""The same for a run that trains on stored samples: no engine serves its weights."""
