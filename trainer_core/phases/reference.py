"""Frozen weights of the reference, for the KL term and DPO."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from trainer_core.model.model import Model
from trainer_core.state.checkpoint import load_weights


class Reference:
    """The weights of an earlier state, which replace the live ones during a forward pass. They are kept in host memory,
    so that no second model occupies the device; of a model with adapters the adapters alone."""

    def __init__(self, directory: Path, model: Model) -> None:
        """Read the weights of a saved state; the model keeps its own, also if reading fails."""
        self._model = model
        with model.weights("writable"):
            live = _copies(model)
            try:
                load_weights(directory, model)
                self._weights = _copies(model)
            finally:
                _put(model, live)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the reference's weights; afterwards it holds its own again, bit for bit."""
        with self._model.weights("writable"):
            live = _copies(self._model)
            _put(self._model, self._weights)
            try:
                yield
            finally:
                _put(self._model, live)


def _copies(model: Model) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in _trained(model)]


def _put(model: Model, weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, weight in zip(_trained(model), weights, strict=True):
            tensor.copy_(weight)


def _trained(model: Model) -> list[torch.Tensor]:
    return [tensor for tensor in model.tensors() if not model.is_frozen(tensor)]
