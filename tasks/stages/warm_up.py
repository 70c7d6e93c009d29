"""Stage `train` of iteration 0: the first train state, after supervised steps if any are requested."""

from tasks.stages.context import RunContext, await_start
from tasks.stages.held_state import saved, trainers
from tasks.stages.names import Stage
from tasks.stages.prepared import prompts
from tasks.stages.served_weights import rest
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.views import Prepared, Trained
from tasks.workers.trainers import TrainerGroup
from trainer_core.batches.reading import solved_examples


@stage(Stage.TRAIN, ("prepare",), Trained)
def warm_up(work: Work, prepared: Prepared) -> StageOutput:
    """Import the model into the trainer, take `warmup.steps` supervised steps and save the state.

    The saved state holds a fresh optimizer: the warm-up's moments and schedule do not carry over into RL.
    """
    section = work.config.warmup
    group = _beside_engines_at_rest(work.context, prepared)
    await_start(work.context, group, "the trainer ranks", group.identity)
    group.import_model()
    metrics: dict[str, float] = {}
    if section.steps:
        examples = solved_examples(prompts(work.context, prepared, "warmup"))
        metrics = group.train_supervised(examples, section.steps, section.batch_size, section.optimizer)
    return saved(work, group, {"cursor": 0}, metrics)


def _beside_engines_at_rest(context: RunContext, prepared: Prepared) -> TrainerGroup:
    """The trainer ranks, which may use the whole card. Starting them starts the engines as well, at the same time; but
    where both take turns there is no room for an engine beside new ranks, which hold weights and gradients."""
    if context.config.train.memory.in_use:
        rest(context, prepared)
        return trainers(context, prepared)
    group = trainers(context, prepared)
    rest(context, prepared)
    return group
