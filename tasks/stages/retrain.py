"""Stage `train` of a run on stored samples: from the previous state and one share of the selection to the next."""

from storage.manifest import Part
from storage.selection import SHARE
from tasks.config.retrain import RetrainSection
from tasks.config.run import RunConfig
from tasks.stages.held_state import ensure_reference, ensure_state, saved
from tasks.stages.names import Stage
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.views import Prepared, Rescored, Selected, Trained
from trainer_core.batches.reading import read_selected


@stage(Stage.TRAIN, ("prepare", "selection", "state"), Trained)
def retrain(work: Work, prepared: Prepared, selected: Selected, state: Trained) -> StageOutput:
    """Take the policy steps on one share with the scores that its samples have."""
    return _trained(work, prepared, selected, None, state)


@stage(Stage.TRAIN, ("prepare", "selection", "reward", "state"), Trained)
def retrain_rescored(
    work: Work, prepared: Prepared, selected: Selected, rescored: Rescored, state: Trained
) -> StageOutput:
    """The same with the scores of stage `rescore`."""
    return _trained(work, prepared, selected, rescored, state)


def _trained(
    work: Work, prepared: Prepared, selected: Selected, rescored: Rescored | None, state: Trained
) -> StageOutput:
    context, shares = work.context, selected.shares
    group = ensure_state(context, prepared, state)
    generators = group.generators()
    ensure_reference(context, prepared, group)
    number = _section(work.config).share(work.iteration, len(shares), work.config.run.seed)
    scores: Part | None = None if rescored is None else rescored.of(number)
    samples = read_selected(work.root, shares[number], scores)
    referenced = work.config.train.policy.needs_reference
    metrics = group.train_policy(samples, selected.temperature, referenced)
    usable = samples.rewards[samples.usable]
    metrics |= {"reward_mean": float(usable.mean())} if len(usable) else {}
    epoch = (work.iteration - 1) // len(shares) + 1
    rng = "reseeded" if generators == "reseeded" else "continued"
    return saved(work, group, {"cursor": state.cursor, "rng": rng, SHARE: number}, {**metrics, "epoch": float(epoch)})


def _section(config: RunConfig) -> RetrainSection:
    assert config.retrain is not None, "a run without [retrain] has another loop"
    return config.retrain
