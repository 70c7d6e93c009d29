"""Stage `train`: from the previous state and one iteration's scored samples to the next state."""

import time

import psutil

from storage.manifest import Manifest
from storage.parts import PartWriter
from tasks.stages.context import RunContext
from tasks.stages.held_state import adopted, ensure_reference, ensure_state, save_state
from tasks.stages.names import Stage
from tasks.stages.stage import StageOutput, StageResult
from tasks.workers.trainers import CONTINUED
from trainer_core.batches.reading import read_samples


def train(
    context: RunContext, iteration: int, prepared: Manifest, rollouts: Manifest, rewards: Manifest, state: Manifest
) -> StageResult:
    """Take the policy steps of one iteration, starting from `state`, and save what results.

    The data cursor travels with the state: prompts count as consumed once they are trained on.
    """
    inputs = {"prepare": prepared, "rollout": rollouts, "reward": rewards, "state": state}

    def body(writer: PartWriter) -> StageOutput:
        return _train(context, writer, prepared, rollouts, rewards, state)

    return adopted(context, context.stage(iteration, Stage.TRAIN, inputs, body))


def _train(
    context: RunContext, writer: PartWriter, prepared: Manifest, rollouts: Manifest, rewards: Manifest, state: Manifest
) -> StageOutput:
    group = ensure_state(context, prepared, state)
    rng = group.call("rng")[0]
    ensure_reference(context, prepared, group)
    samples = read_samples(context.root, rollouts, rewards)
    referenced = context.config.train.policy.kl_coefficient > 0
    metrics = group.call("train_policy", samples, context.config.rollout.temperature, referenced)[0]
    resumed = {} if rng == CONTINUED else {"process_to_gradient_s": time.time() - psutil.Process().create_time()}
    saved = save_state(context, group, writer)
    return StageOutput(
        parts=saved.parts,
        facts={"cursor": rollouts.facts["cursor"], "rng": "reseeded" if rng == "reseeded" else "continued"},
        metrics={**metrics, **resumed, "save_seconds": saved.seconds},
        store=saved.store,
    )
