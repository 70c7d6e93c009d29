"""Token sequences as flat arrays and as padded matrices."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Padded:
    """Sequences as rows. Position s of a row predicts the sequence's token s + 1."""

    tokens: NDArray[np.int64]
    """(N, S) inputs; 0 beyond the end."""
    targets: NDArray[np.int64]
    """(N, S) the token after each input; 0 beyond the end."""
    mask: NDArray[np.bool_]
    """(N, S) positions whose target counts."""
    widths: NDArray[np.int64]
    """(N,) positions that hold a target at all."""

    def width_of(self, rows: NDArray[np.int64]) -> int:
        """Columns that these rows need."""
        return max(1, int(self.widths[rows].max()))


@dataclass(frozen=True)
class Sequences:
    """N sequences of prompt and response, one after another in flat arrays."""

    tokens: NDArray[np.int32]
    """Token ids of all sequences: prompt, response, prompt, response, ..."""
    prompt_lengths: NDArray[np.int64]
    """(N,) tokens in each prompt."""
    response_lengths: NDArray[np.int64]
    """(N,) tokens in each response."""

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(N,) tokens in each sequence."""
        return self.prompt_lengths + self.response_lengths

    def padded(self) -> Padded:
        """Rows of the longest sequence's width; the mask marks the positions that predict response tokens."""
        lengths = self.lengths
        width = max(1, int(lengths.max()) - 1)
        columns = np.arange(width + 1)
        rows = np.zeros((len(self), width + 1), dtype=np.int64)
        rows[columns < lengths[:, None]] = self.tokens
        tokens = np.where(columns[:-1] < lengths[:, None] - 1, rows[:, :-1], 0)
        return Padded(tokens, rows[:, 1:], self._predicts_response(width), lengths - 1)

    def spread(self, values: NDArray[np.float32], width: int) -> Matrix:
        """Values of the response tokens, flat, placed where predicted: (sum of response lengths,) -> (N, S)."""
        matrix = np.zeros((len(self), width), dtype=np.float32)
        matrix[self._predicts_response(width)] = values
        return matrix

    def _predicts_response(self, width: int) -> NDArray[np.bool_]:
        columns = np.arange(width)
        return (columns >= self.prompt_lengths[:, None] - 1) & (columns < self.lengths[:, None] - 1)


class SupervisedExamples(Sequences):
    """Prompts with the responses to be learned."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> "SupervisedExamples":
        """From (prompt tokens, response tokens) pairs; a prompt has at least one token."""
        prompts = np.array([len(prompt) for prompt, _ in pairs], dtype=np.int64)
        responses = np.array([len(response) for _, response in pairs], dtype=np.int64)
        tokens = [token for prompt, response in pairs for token in (*prompt, *response)]
        return cls(np.array(tokens, dtype=np.int32), prompts, responses)


@dataclass(frozen=True)
class Samples(Sequences):
    """Sampled responses of one iteration with what the engine and the reward report about them."""

    engine_logprobs: NDArray[np.float32]
    """Of all response tokens, flat, in nats, under the distribution they were sampled from."""
    rewards: NDArray[np.float32]
    """(N,) scores; arbitrary where `usable` is False."""
    groups: NDArray[np.int32]
    """(N,) number of the prompt group."""
    usable: NDArray[np.bool_]
    """(N,) whether there is a reward and at least one response token."""


def as_sequences(sequences: Sequence[NDArray[np.int32]]) -> Sequences:
    """Whole sequences, in which every token but the first counts as response."""
    tokens = np.concatenate(sequences).astype(np.int32)
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    return Sequences(tokens, np.ones_like(lengths), lengths - 1)


def share_rows(rows: NDArray[np.int64], replicas: int, micro_batch_size: int) -> list[list[NDArray[np.int64]]]:
    """Split rows over data-parallel replicas and then into micro-batches: result[replica][micro-batch] -> (B,).

    All replicas get the same number of micro-batches of the same size, as the schedules require; missing rows
    are -1.
    """
    size = min(micro_batch_size, -(-len(rows) // replicas))
    count = -(-len(rows) // (size * replicas))
    filled = np.full(count * size * replicas, -1, dtype=np.int64)
    filled[: len(rows)] = rows
    shares = filled.reshape(count, size, replicas)
    return [[shares[batch, :, replica] for batch in range(count)] for replica in range(replicas)]


def per_position(sequence_values: NDArray[np.float32], padded: Padded) -> Matrix:
    """One value per sequence, spread over the positions of its row: (N,) -> (N, S)."""
    return np.broadcast_to(sequence_values[:, None], padded.tokens.shape)
