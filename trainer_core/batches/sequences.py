"""Token sequences in flat arrays, one after another."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Sequences:
    """N sequences of prompt and response, one after another in flat arrays."""

    tokens: NDArray[np.int32]  # token ids of all sequences: prompt, response, prompt, response, ..
    prompt_lengths: NDArray[np.int64]  # (N,) tokens in each prompt
    response_lengths: NDArray[np.int64]  # (N,) tokens in each response that count: those that the policy sampled
    gaps: NDArray[np.int64] | None = field(default=None, kw_only=True)
    """(sum of response lengths,) tokens right before each token of a response that do not count, as those of tools
    between two turns; None if there are none. They are inputs, and are never predicted."""
    routes: NDArray[np.uint8] | None = field(default=None, kw_only=True)
    """(sum of positions, bytes) experts by which the engine sampled, for each position; 0 where a sample is not usable.
    None if they are not asked for."""

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(N,) tokens in each sequence."""
        whole = self.prompt_lengths + self.response_lengths
        return whole if self.gaps is None else whole + response_sums(self.gaps, self.response_lengths).astype(np.int64)

    @property
    def positions(self) -> NDArray[np.int64]:
        """(N,) predicting positions of each sequence: all but the last."""
        return self.lengths - 1

    @property
    def ends(self) -> "Sequences":
        """Each sequence as the prompt of one token more, which is not an input: what predicts it has read the whole."""
        lengths = self.lengths
        return Sequences(np.insert(self.tokens, np.cumsum(lengths), 0), lengths, np.ones_like(lengths))

    def per_response_token(self, values: NDArray) -> NDArray:
        """One value per sequence, repeated for each token of its response: (N,) -> (sum of response lengths,)."""
        return np.repeat(values, self.response_lengths)


class SupervisedExamples(Sequences):
    """Prompts with responses to imitate."""


@dataclass(frozen=True)
class TopTokens:
    """The k tokens that a model finds likeliest at the place of each of R response tokens, the likeliest first."""

    tokens: NDArray[np.int32]  # (R, k) token ids; 0 where the sample is not usable
    logprobs: NDArray[np.float32]  # (R, k) in nats, under the whole softmax; 0 there too


@dataclass(frozen=True)
class TeacherScores:
    """Scores of R response tokens by a teacher."""

    logprobs: Vector  # (R,) log-probability of each, in nats; 0 where the sample is not usable
    top: TopTokens | None = None  # its own likeliest tokens there; None if they are not asked for


@dataclass(frozen=True)
class Samples(Sequences):
    """Sampled responses of one iteration, with the engine's log-probabilities and the rewards."""

    engine_logprobs: NDArray[np.float32]
    """Log-probabilities of all response tokens that count, flat, in nats, under the distribution that sampled them."""
    rewards: NDArray[np.float32]  # (N,) scores; arbitrary where `usable` is False
    groups: NDArray[np.int32]  # (N,) number of the prompt group
    usable: NDArray[np.bool_]
    """(N,) True where there is at least one response token, and a reward if the objective needs rewards."""
    teacher_logprobs: Vector | None = None
    """Log-probabilities of the same tokens by a teacher, in nats; None if there is none."""
    teacher_top: TopTokens | None = None
    """The teacher's likeliest tokens in their place; None if they are not asked for."""
    values: Vector | None = None
    """Returns that a critic expects from each of these tokens on; None if there is none."""
    branches: NDArray[np.int64] | None = None
    """(M,) sequences of each of M samples, one sample after another: the branches of its conversation, which share its
    reward; the last is its row of the rollout. None if each sample is one sequence."""

    @property
    def owners(self) -> NDArray[np.int64]:
        """(N,) number of the sample that each sequence is of."""
        return (
            np.arange(len(self)) if self.branches is None else np.repeat(np.arange(len(self.branches)), self.branches)
        )

    @property
    def rows(self) -> NDArray[np.int64]:
        """(M,) number of the sequence that is the row of each sample."""
        return np.arange(len(self)) if self.branches is None else np.cumsum(self.branches) - 1

    @property
    def sample_lengths(self) -> NDArray[np.int64]:
        """(M,) response tokens of each sample that count, of all its branches."""
        if self.branches is None:
            return self.response_lengths
        return response_sums(self.response_lengths, self.branches).astype(np.int64)


def response_sums(values: NDArray, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Values of response tokens, added up over each response: (sum of lengths,), (N,) -> (N,)."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(rows, weights=values, minlength=len(lengths)).astype(np.float64)


def as_sequences(sequences: Sequence[NDArray[np.int32]]) -> Sequences:
    """Sequences in which every token but the first counts as response."""
    tokens = np.concatenate(sequences).astype(np.int32)
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    return Sequences(tokens, np.ones_like(lengths), lengths - 1)
