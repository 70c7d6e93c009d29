"""The reward `reward_model`: the value that the classifier of `[engines.judge]` gives to prompt and response together.

It is given the token ids that the policy saw and sampled, so it has the policy's tokenizer. What was scored is not kept
apart from the scores: on CPU the same tokens have the same value bit for bit, and to ask again costs milliseconds."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import InputError
from tasks.rewards.sample import Score, failed

_TOGETHER = 256  # sequences of one call to the engine


@dataclass(frozen=True)
class RewardModel:
    """The classifier of a run."""

    longest: int  # prompt and response, in tokens
    values: Callable[[list[NDArray[np.int32]]], NDArray[np.float32]]
    """(N,) values behind the last tokens of sequences; starts the engine if it is not there. Raises WorkerLost."""


def reward_model(record: Mapping[str, Any], response: str) -> float:
    """Stands for the reward where functions are listed. Raises ValueError: texts are nothing that it scores."""
    raise ValueError("a reward model scores token ids, on the engine of a run: see engines.judge")


def valued(sequences: Sequence[NDArray[np.int32]], model: RewardModel | None) -> list[Score]:
    """Scores of prompts with their responses, by the value behind the last token. Raises InputError (there is no
    model) or WorkerLost (its engine has died: no sequence has a score then)."""
    if model is None:
        raise InputError(
            "the reward `reward_model` has no engine in this run: start a new run with the folder of a reward model as "
            "engines.judge.source"
        )
    fitting = itertools.batched((one for one in sequences if len(one) <= model.longest), _TOGETHER)
    values = itertools.chain.from_iterable(model.values(list(some)).tolist() for some in fitting)
    return [_score(len(one), model.longest, values) for one in sequences]


def _score(tokens: int, longest: int, values: Iterator[float]) -> Score:
    if tokens > longest:
        fact = f"prompt and response have {tokens} tokens, and engines.judge.max_model_len is {longest}"
        return failed("exception", f"{fact}: raise it in a new run")
    if not math.isfinite(value := next(values)):
        return failed("non_finite", f"the reward model gives {value}")
    return Score(value, "ok")
