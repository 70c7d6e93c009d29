"""Stage `train`: from the previous state and one iteration's scored samples to the next state."""

import time

from tasks.stages.held_state import ensure_reference, ensure_state, saved
from tasks.stages.names import Stage
from tasks.stages.served_weights import rest
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.turns import resume
from tasks.stages.views import Prepared, Rewards, Rollouts, Trained
from trainer_core.batches.reading import read_samples


@stage(Stage.TRAIN, ("prepare", "rollout", "reward", "state"), Trained)
def train(work: Work, prepared: Prepared, rollouts: Rollouts, rewards: Rewards, state: Trained) -> StageOutput:
    """Take the policy steps of one iteration, starting from `state`, and save the result.

    The data cursor travels with the state: prompts count as consumed once they are trained on.
    """
    context = work.context
    rest(context, prepared)
    group = ensure_state(context, prepared, state)
    generators = group.generators()
    resumed = resume(context, group)
    ensure_reference(context, prepared, group)
    samples = read_samples(work.root, rollouts.manifest, rewards.manifest)
    referenced = work.config.train.policy.needs_reference
    metrics = {**group.train_policy(samples, work.config.rollout.temperature, referenced), **resumed}
    if generators != "continued":
        metrics = {**metrics, "process_to_gradient_s": time.time() - group.began}
    rng = "reseeded" if generators == "reseeded" else "continued"
    return saved(work, group, {"cursor": rollouts.cursor, "rng": rng}, metrics)
