"""The supervised phase: the warm-up before reinforcement learning, by the same updates."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.errors import InputError
from trainer_core.batches.sequences import SupervisedExamples
from trainer_core.model.optimizer import Optimizer
from trainer_core.model.passes import Objective, Passes
from trainer_core.objectives.losses import likelihood_loss
from trainer_core.objectives.tokens import Tokens
from trainer_core.phases.update import apply_loss, mean_auxiliary_loss
from trainer_core.progress import reported, told_whole

STEP = "step/"  # beginning of the name of a step's metric; the step's number, from 1, follows. The value is its loss.


@dataclass(frozen=True)
class SupervisedPhase:
    """Maximum likelihood of the responses."""

    passes: Passes
    optimizer: Optimizer
    seed: int  # seeds the order of the examples

    def run(self, examples: SupervisedExamples, steps: int, batch_size: int) -> dict[str, float]:
        """Take `steps` updates; returns the report of `TrainerProtocol.train_supervised`. Collective. Raises
        InputError: there are no examples. Raises NumericsError: a loss or gradient norm is not finite."""
        if not len(examples):
            raise InputError("the supervised phase has no examples; give some, or set its steps to 0")
        weights = np.ones(len(examples), dtype=np.float32)
        objective = Objective(
            lambda batch, logprobs, _: likelihood_loss(Tokens(logprobs, batch.segments, batch.values)), 1.0, "none"
        )
        updates, tokens = [], 0
        chosen = list(batches(len(examples), batch_size, steps, self.seed))
        for rows in told_whole(chosen, "steps", lambda: f"loss {updates[-1].loss:.4g}" if updates else ""):
            update, _ = apply_loss(self.passes, self.optimizer, examples, rows, weights, {}, objective)
            updates.append(update)
            tokens += int(examples.response_lengths[rows].sum())
        if not updates:
            return {"steps": 0.0, "tokens": 0.0}
        return {
            "first_loss": updates[0].loss,
            "loss": updates[-1].loss,
            "grad_norm": float(np.mean([update.grad_norm for update in updates])),
            "learning_rate": updates[-1].learning_rate,
            "steps": float(steps),
            "tokens": float(tokens),
            **mean_auxiliary_loss(updates),
            **{f"{STEP}{number + 1}": updates[number].loss for number in reported(steps)},
        }


def batches(count: int, batch_size: int, steps: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """`steps` batches of row numbers, each example once per pass, each pass in a different order."""
    generator = np.random.default_rng(seed)
    size = min(batch_size, count)
    order = np.empty(0, dtype=np.int64)
    for _ in range(steps):
        if len(order) < size:
            order = np.concatenate((order, generator.permutation(count)))
        yield order[:size]
        order = order[size:]
