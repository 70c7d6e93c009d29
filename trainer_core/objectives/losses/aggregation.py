"""How the losses of tokens become the loss of a mini-batch. Imports no torch."""

import numpy as np
from numpy.typing import NDArray

from trainer_core.objective_config import Aggregation


def sequence_weights(
    response_lengths: NDArray[np.int64], groups: NDArray[np.int32], aggregation: Aggregation, length: int | None = None
) -> NDArray[np.float32]:
    """Weight of each sequence's summed loss in the loss of a mini-batch: (n,) tokens, (n,) group numbers -> (n,).

    "token" weighs all tokens equally (DAPO, arXiv 2503.14476 section 3.3), "sequence" gives every sequence the same
    weight in all (GRPO, arXiv 2402.03300 equation 3), "group" every prompt group, and within it every token. Their
    weights times lengths sum to the number of tokens, by which Megatron divides the sum over all micro-batches and
    data-parallel ranks. "constant" divides the sum over a sequence by `length` instead of its own length
    (Dr. GRPO, arXiv 2503.20783), so that long responses weigh more.
    """
    if aggregation == "token":
        return np.ones(len(response_lengths), dtype=np.float32)
    if aggregation == "constant":
        share = response_lengths.sum() / (len(response_lengths) * (length or 1))
        return np.full(len(response_lengths), share, dtype=np.float32)
    members = np.arange(len(response_lengths)) if aggregation == "sequence" else groups
    _, unit = np.unique(members, return_inverse=True)  # what gets an equal share
    tokens = np.bincount(unit, response_lengths)  # of each unit
    shares = response_lengths.sum() / (np.count_nonzero(tokens) * np.maximum(tokens, 1))
    return shares[unit].astype(np.float32)
