"""Stage `train` of iteration 0: the first state of the learner, after supervised steps if any are asked for."""

import pyarrow as pa

from storage.manifest import Manifest
from storage.parts import PartWriter
from tasks.stages.context import RunContext
from tasks.stages.held_state import adopted, learner, save_state
from tasks.stages.names import Stage
from tasks.stages.prepare import prompts
from tasks.stages.stage import StageOutput, StageResult
from trainer_core.batches.sequences import SupervisedExamples


def warm_up(context: RunContext, prepared: Manifest) -> StageResult:
    """Import the model into the trainer, take `warmup.steps` supervised steps and save the state.

    The state that is saved holds a fresh optimizer: the warm-up's moments and schedule do not go on into RL.
    """
    result = context.stage(0, Stage.TRAIN, {"prepare": prepared}, lambda writer: _warm_up(context, writer, prepared))
    return adopted(context, result)


def _warm_up(context: RunContext, writer: PartWriter, prepared: Manifest) -> StageOutput:
    section = context.config.warmup
    group = learner(context, prepared)
    group.call("import_model")
    metrics: dict[str, float] = {}
    if section.steps:
        examples = _examples(prompts(context, prepared, "warmup"))
        metrics = group.call("train_supervised", examples, section.steps, section.batch_size, section.optimizer)[0]
    saved = save_state(context, group, writer)
    metrics = {**metrics, "save_seconds": saved.seconds}
    return StageOutput(parts=saved.parts, facts={"cursor": 0}, metrics=metrics, store=saved.store)


def _examples(table: pa.Table) -> SupervisedExamples:
    solved = table.filter(table["answer_tokens"].is_valid())
    pairs = zip(solved["prompt_tokens"].to_pylist(), solved["answer_tokens"].to_pylist(), strict=True)
    return SupervisedExamples.of(list(pairs))
