"""One optimizer update on the loss of a mini-batch: what every phase of training does."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.errors import NumericsError
from trainer_core.batches.sequences import Matrix, Padded
from trainer_core.model.optimizer import Optimizer
from trainer_core.model.passes import LossFunction, Passes


@dataclass(frozen=True)
class Update:
    """What an update reports."""

    loss: float
    """Weighted mean over tokens, before the update."""
    clip_fraction: float
    """Share of tokens whose surrogate was clipped."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    learning_rate: float
    """Learning rate of the update."""


def apply_loss(
    passes: Passes,
    optimizer: Optimizer,
    padded: Padded,
    rows: NDArray[np.int64],
    extras: Mapping[str, Matrix],
    temperature: float,
    loss: LossFunction,
) -> Update:
    """Take one optimizer step on `rows`. Collective.

    Raises:
        NumericsError: if the loss or the gradient norm is not finite; the weights are then unchanged.
    """
    report = passes.gradients(padded, rows, extras, temperature, loss)
    if not math.isfinite(report["loss"]):
        raise NumericsError(
            f"the loss is {report['loss']} at update {optimizer.updates + 1}; the update was not applied: lower the "
            f"learning rate ({optimizer.config.learning_rate}) or look at the samples of this iteration"
        )
    norm = optimizer.update()
    return Update(report["loss"], report["clip_fraction"], norm, optimizer.learning_rate)
