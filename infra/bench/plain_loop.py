"""The plain training step of megatron-core: padded rows with labels, and its own cross-entropy."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from trainer_core.batches.sequences import Samples
from trainer_core.model.model import Model
from trainer_core.model.optimizer import Optimizer


@dataclass(frozen=True)
class PaddedBatch:
    """B rows of the width of the longest, on the device."""

    tokens: torch.Tensor
    """(B, S) int64."""
    positions: torch.Tensor
    """(B, S) int64."""
    labels: torch.Tensor
    """(B, S) int64."""
    mask: torch.Tensor
    """(B, S) float32, 1 where a response token is predicted."""


def padded_batches(samples: Samples, rows: int, device: torch.device, multiple: int = 1) -> list[PaddedBatch]:
    """The samples in their order, `rows` at a time; S is a multiple of `multiple`."""
    ends = np.cumsum(samples.lengths)
    sequences = np.split(samples.tokens, ends[:-1])
    return [
        _padded(sequences[first : first + rows], samples.prompt_lengths[first : first + rows], device, multiple)
        for first in range(0, len(samples), rows)
    ]


def plain_step(model: Model, optimizer: Optimizer, batches: list[PaddedBatch]) -> float:
    """One update of maximum likelihood on the batches; returns the sum of losses, which waits for the device."""

    def forward(source: Iterator[PaddedBatch], module: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        batch = next(source)
        losses = module(batch.tokens, batch.positions, None, labels=batch.labels)  # (B, S)

        def masked(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            total = (losses * batch.mask).sum()
            return total, batch.mask.sum().int(), total.detach()

        return losses, masked

    model.zero_gradients()
    width = max(batch.tokens.shape[1] for batch in batches)
    sums = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=list(model.chunks),
        num_microbatches=len(batches),
        seq_length=width,
        micro_batch_size=len(batches[0].tokens),
        forward_only=False,
    )
    optimizer.megatron.step()
    return float(torch.stack(sums).sum())


def _padded(sequences: list[np.ndarray], prompts: np.ndarray, device: torch.device, multiple: int) -> PaddedBatch:
    lengths = np.array([len(sequence) for sequence in sequences])[:, None]  # (B, 1)
    columns = np.arange(1 - (1 - int(lengths.max())) // multiple * multiple)
    tokens = np.zeros((len(sequences), len(columns)), dtype=np.int64)
    tokens[columns < lengths] = np.concatenate(sequences)
    places = columns[None, :-1]
    mask = (places >= prompts[:, None] - 1) & (places < lengths - 1)
    moved = [
        torch.from_numpy(np.ascontiguousarray(array)).to(device)
        for array in (tokens[:, :-1], np.broadcast_to(places, mask.shape), tokens[:, 1:], mask.astype(np.float32))
    ]
    return PaddedBatch(*moved)
