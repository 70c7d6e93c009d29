"""Stage `train`: from one train state to the next by policy steps; at iteration 0 the first, by supervised steps."""

import time
from collections.abc import Callable
from functools import partial

import pyarrow as pa

from storage.parts import read_parts, read_table
from storage.schema import ROLLOUT, SELECTION, TRAINER
from tasks.stages.context import await_start
from tasks.stages.held_state import ensure_reference, ensure_state, resume, saved, stores, trainers
from tasks.stages.names import Stage
from tasks.stages.prepared import prompts
from tasks.stages.served_weights import rest
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.training_set import NAMES, Teach, TrainingSet, by_token, of_rollout, of_selection, taught
from tasks.stages.views import TRAINER_TABLE, Prepared, Rescored, Rewards, Rollouts, Selected, Trained
from trainer_core.batches.reading import solved_examples


@stage(Stage.TRAIN, ("prepare", "rollout", "reward", "state"), Trained)
def train(work: Work, prepared: Prepared, rollouts: Rollouts, rewards: Rewards | None, state: Trained) -> StageOutput:
    """Train on the samples of one rollout. Prompts count as consumed once they are trained on."""
    found = of_rollout(work.context, rollouts, rewards)
    names = partial(read_table, work.root, rollouts.manifest, ROLLOUT, NAMES)
    with work.context.turn:
        rest(work.context, prepared)
        return _trained(work, prepared, state, found, names, partial(taught, work, prepared, names))


@stage(Stage.TRAIN, ("prepare", "selection", "reward", "state"), Trained)
def retrain(
    work: Work, prepared: Prepared, selected: Selected, rescored: Rescored | None, state: Trained
) -> StageOutput:
    """Train on one share of a selection, with the scores of stage `rescore` or with those that its samples have."""
    found, share = of_selection(work.context, work.iteration, selected, rescored, state)
    names = partial(read_parts, work.root, [share], SELECTION, NAMES)
    return _trained(work, prepared, state, found, names, partial(taught, work, selected, names))


def _trained(
    work: Work, prepared: Prepared, state: Trained, found: TrainingSet, names: Callable[[], pa.Table], teach: Teach
) -> StageOutput:
    """Take the policy steps on the samples, starting from `state`, and save the result."""
    context, policy = work.context, work.config.train.policy
    group = ensure_state(context, prepared, state)
    generators = group.generators()
    resumed = resume(context, group)
    ensure_reference(context, prepared, group)
    samples, scored = teach(group, found.samples, found.temperature)
    metrics = group.train_policy(samples, found.temperature, policy.needs_reference)
    metrics = {**metrics, **resumed, **found.metrics}
    if generators != "continued":
        metrics["process_to_gradient_s"] = time.time() - group.began
    rng = "reseeded" if generators == "reseeded" else "continued"
    if not stores(work, found.last):
        return saved(work, group, {**found.facts, "rng": rng}, metrics, found.last)
    table = by_token(names(), samples, group.policy_logprobs(), TRAINER)
    write = partial(work.writer.write_table, TRAINER_TABLE, table, TRAINER)
    return saved(work, group, {**found.facts, "rng": rng}, metrics, found.last, lambda: (*scored, write()))


@stage(Stage.TRAIN, ("prepare",), Trained)
def warm_up(work: Work, prepared: Prepared) -> StageOutput:
    """Import the model into the trainer, take `warmup.steps` supervised steps and save the state. The saved state holds
    a fresh optimizer: the warm-up's moments and schedule do not carry over into RL."""
    section, turns = work.config.warmup, work.config.train.memory.in_use
    if turns:  # there is no room for an engine beside new ranks, which hold weights and gradients
        rest(work.context, prepared)
    group = trainers(work.context, prepared)
    if not turns:  # the start of the ranks has begun that of the engines
        rest(work.context, prepared)
    await_start(work.context, group, "the trainer ranks", group.identity)
    group.import_model()
    metrics: dict[str, float] = {}
    if section.steps:
        examples = solved_examples(prompts(work.context, prepared, "warmup"))
        metrics = group.train_supervised(examples, section.steps, section.batch_size, section.optimizer)
    return saved(work, group, {"cursor": 0}, metrics)
