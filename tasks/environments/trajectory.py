"""A trajectory: the tokens of a conversation as the policy saw and sampled them, and their columns in a rollout."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.parts import list_column
from storage.schema import ROLLOUT, TURN
from storage.turns import UNKNOWN
from tasks.data.chat import ASSISTANT
from tasks.engine.protocol import TokenIds

_EMPTY = {
    "response_tokens": np.empty(0, np.int32),
    "sampled": np.empty(0, np.bool_),
    "logprobs": np.empty(0, np.float32),
    "weight_version": np.empty(0, np.int32),
}


class Answer(NamedTuple):
    """Tokens that the policy has sampled in one go."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]  # of each of them, nat
    finish_reason: str  # stop, length or abort
    weight_version: int | None  # iteration whose weights sampled them
    cached: tuple[int, int] | None = None  # as `tasks.engine.protocol.Finished`


class Trajectory:
    """A prompt and the turns after it, each appended once and never changed. Tokens of answers are kept as they were
    sampled, so that every trained token was sampled after exactly those before it."""

    def __init__(self, prompt: TokenIds) -> None:
        self.prompt = np.asarray(prompt, np.int32)
        self.turns: list[dict[str, Any]] = []  # as `storage.schema.TURN`
        self.length = 0  # tokens after the prompt
        self.eligible = 0  # full blocks of tokens that the prefix cache of an engine had from an earlier answer
        self.hits = 0  # those of them that were there
        self._before = 0  # tokens up to the end of the last answer
        self._pieces: list[Answer] = []  # one for each turn; those that were not sampled have no log-probability

    def observe(self, tokens: TokenIds, role: str, **more: Any) -> None:
        """Append tokens that the policy did not sample; `more` are further fields of the turn."""
        given = np.asarray(tokens, np.int32)
        self._append(Answer(given, np.zeros(len(given), np.float32), "", UNKNOWN), {"role": role, **more})

    def answer(self, answer: Answer, **more: Any) -> None:
        """Append what the policy has sampled after all tokens before it."""
        if answer.cached is not None:
            there, block = answer.cached
            full = max(0, self._before - 1) // block  # the last token was sampled, and never read
            self.eligible, self.hits = self.eligible + full, self.hits + min(full, there // block)
        self._append(answer, {"role": ASSISTANT, "finish_reason": answer.finish_reason, **more})
        self._before = len(self.prompt) + self.length

    @property
    def answers(self) -> int:
        """Turns of the policy."""
        return sum(turn["role"] == ASSISTANT for turn in self.turns)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens, which an engine is given for the next answer: (prompt + length,)."""
        return np.concatenate([self.prompt, *(piece.tokens for piece in self._pieces)])

    def columns(self) -> dict[str, Any]:
        """Its values in the table `rollout`, those of lists as arrays."""
        flat = zip(*map(_flat, self._pieces), strict=True) if self._pieces else [()] * len(_EMPTY)
        joined = [np.concatenate([empty, *some]) for empty, some in zip(_EMPTY.values(), flat, strict=True)]
        return {"prompt_tokens": self.prompt, **dict(zip(_EMPTY, joined, strict=True)), "turns": self.turns}

    def _append(self, piece: Answer, turn: dict[str, Any]) -> None:
        begin, self.length = self.length, self.length + len(piece.tokens)
        self._pieces.append(piece)
        self.turns.append({**turn, "begin": begin, "end": self.length})


def _flat(piece: Answer) -> tuple[NDArray[Any], ...]:
    """Values of each token of a turn, in the order of `_EMPTY`."""
    count, version = len(piece.tokens), UNKNOWN if piece.weight_version is None else piece.weight_version
    return piece.tokens, np.full(count, piece.finish_reason != ""), piece.logprobs, np.full(count, version, np.int32)


def columns_of(trajectories: Sequence[Trajectory]) -> dict[str, pa.Array]:
    """Columns of the table `rollout` that come from trajectories, a row for each: (N,)."""
    rows = [one.columns() for one in trajectories]
    known = {field.name: None for field in TURN}
    turns = [[{**known, **turn} for turn in row["turns"]] for row in rows]
    types = {name: ROLLOUT.field(name).type.value_type for name in ("prompt_tokens", *_EMPTY)}
    named = {name: list_column([row[name] for row in rows], kind) for name, kind in types.items()}
    return {**named, "turns": pa.array(turns, ROLLOUT.field("turns").type)}
