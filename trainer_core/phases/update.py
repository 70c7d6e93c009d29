"""One optimizer update on the loss of a mini-batch, as every training phase takes it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.errors import NumericsError
from trainer_core.batches.sequences import Sequences, Vector
from trainer_core.model.optimizer import Optimizer
from trainer_core.model.passes import Gradients, Objective, Passes
from trainer_core.objectives.objective_config import PolicyConfig
from trainer_core.objectives.selection import Units
from trainer_core.optimizer_config import CriticConfig


@dataclass(frozen=True)
class UpdateReport:
    """Report of an update: numbers alone, so that a list of them holds nothing on the device."""

    loss: float
    clip_fraction: float
    grad_norm: float  # global norm of the gradient before clipping
    learning_rate: float  # learning rate of the update
    auxiliary_loss: float | None  # auxiliary loss that balances routers; None if they are not balanced


def apply_loss(
    passes: Passes,
    optimizer: Optimizer,
    sequences: Sequences,
    rows: NDArray[np.int64],
    weights: Vector,
    values: Mapping[str, NDArray],
    objective: Objective,
) -> tuple[UpdateReport, Gradients]:
    """Take one optimizer step on `rows`; the arguments are those of `Passes.gradients`. Collective. Returns its report,
    and the pass before it, which holds its micro-batches. Raises NumericsError: the loss or the gradient norm is not
    finite; weights and buffers are then unchanged."""
    with passes.model.buffers_kept_on_failure():
        gradients = passes.gradients(sequences, rows, weights, values, objective)
        if not math.isfinite(gradients.loss):
            raise NumericsError(
                f"the loss is {gradients.loss} at update {optimizer.updates + 1}; the update was not applied: "
                f"{optimizer.remedy}"
            )
        norm = optimizer.update()
    clipped, rate = gradients.clip_fraction, optimizer.learning_rate
    return UpdateReport(gradients.loss, clipped, norm, rate, gradients.auxiliary_loss), gradients


def mini_batches(
    units: Units, config: PolicyConfig | CriticConfig, optimizer: Optimizer, seed: tuple[int, ...]
) -> Iterator[Units]:
    """Mini-batches of all epochs, in order; each epoch is shuffled by the seed and the optimizer's updates."""
    for _ in range(config.epochs):
        order = units
        if config.mini_batches > 1:
            order = np.random.default_rng((*seed, optimizer.updates)).permutation(units)
        yield from filter(len, np.array_split(order, config.mini_batches))


def mean_auxiliary_loss(updates: Sequence[UpdateReport]) -> dict[str, float]:
    """Mean over updates, as a metric; empty if routers are not balanced."""
    found = [update.auxiliary_loss for update in updates if update.auxiliary_loss is not None]
    return {"auxiliary_loss": float(np.mean(found))} if found else {}
