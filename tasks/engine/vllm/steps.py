"""Messages about a step over rows, from the scheduler to a model runner and back in arrays, and the tokens of responses
as the scheduler keeps them. Imports vLLM, but no code for cards."""

import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request

from tasks.engine.vllm import EVERY
from tasks.engine.vllm.rows import Places, Planned

_NEVER = (1 << 40, float(1 << 40))


@dataclass
class Step(SchedulerOutput):
    """A step of which some requests are rows. These come first in `num_scheduled_tokens`."""

    planned: Planned | None = None  # the rows
    alone: bool = False
    """It has no other requests, so it differs from the step before of the same number by new blocks at most."""


@dataclass
class Arrays(ModelRunnerOutput):
    """Samples of a step, without an object for each token."""

    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # by place in the batch
    counts: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """1 where the step has sampled, 0 where a prompt is not complete."""


class Samples:
    """Samples of a step, by place in its batch."""

    def __init__(self, step: SchedulerOutput, found: ModelRunnerOutput) -> None:
        self._found = found
        self.planned = step.planned if isinstance(step, Step) else None
        self._places = found.req_id_to_index
        if self.planned is not None and not self._places:
            self._places = {name: place for place, name in enumerate(self.planned.scheduled)}
        self._logprobs = found.logprobs.logprobs[:, 0] if found.logprobs else None
        self._firsts = found.logprobs.cu_num_generated_tokens if found.logprobs else None

    def places(self, names: Iterable[str]) -> Places:
        """Of requests."""
        return np.fromiter(map(self._places.__getitem__, names), dtype=np.intp)

    def rows(self, planned: Planned) -> Places:
        """Of the rows of the step."""
        if isinstance(self._found, Arrays):  # that runner keeps their order
            return np.arange(len(planned.serials))
        return self.places(planned.scheduled)

    def tokens(self, at: Places) -> NDArray[np.int32]:
        """One for each place."""
        if isinstance(self._found, Arrays):
            return self._found.tokens[at].astype(np.int32)
        sampled = self._found.sampled_token_ids
        return np.array([sampled[place][0] for place in at.tolist()], dtype=np.int32)

    def logprobs(self, at: Places) -> NDArray[np.float32]:
        """One for each place. Rows ask for them."""
        assert self._logprobs is not None
        return self._logprobs[at if self._firsts is None else np.asarray(self._firsts)[at]]

    def some(self, names: Iterable[str]) -> ModelRunnerOutput:
        """As vLLM's scheduler reads it, for some requests and without log-probabilities, which it would cut up."""
        found, places = self._found, {name: place for place, name in enumerate(names)}
        at = [self._places[name] for name in places]
        if isinstance(found, Arrays):
            sampled = [[int(found.tokens[place])] if found.counts[place] else [] for place in at]
        else:
            sampled = [found.sampled_token_ids[place] for place in at] if found.sampled_token_ids else []
        return replace(found, req_id_to_index=places, sampled_token_ids=sampled, logprobs=None)

    def of(self, name: str, tokens: int) -> list[float]:
        """Log-probabilities of a request's tokens in this step; none if the step has not computed any."""
        if self._logprobs is None or not tokens:
            return []
        place = self._places[name]
        first = place if self._firsts is None else self._firsts[place]
        return self._logprobs[first : first + tokens].tolist()


class Response:
    """Sampled tokens of a response, without those that its row holds, and the number of those that were told."""

    def __init__(self, line: int, request: Request | None = None) -> None:
        self.tokens, self.logprobs = array("i"), array("f")  # 8 bytes a token: objects of Python take ten times that
        self.line = line  # of the table of ends, after the tokens
        self._prefill = None if request is None else request.prefill_stats  # vLLM fills it in
        how = None if request is None else request.sampling_params
        self._every = ((how.extra_args or {}) if how is not None else {}).get(EVERY) or _NEVER
        self._told = 0
        self._since = time.monotonic()

    @property
    def due(self) -> int:
        """Number of tokens at which it is to be told."""
        return self._told + self._every[0]

    @property
    def due_at(self) -> int:
        """Time at which it is to be told, ms of the steady clock."""
        return int(1000 * (self._since + self._every[1]))

    def is_due(self) -> bool:
        """True if its tokens are to be told now."""
        count = len(self.tokens)
        return count >= self.due or (count > self._told and time.monotonic() * 1000 >= self.due_at)

    def whole(self, last: EngineCoreOutput) -> EngineCoreOutput:
        """The last output of the request, with all tokens and, if they were asked for, their log-probabilities."""
        last.prefill_stats = self._prefill
        return _with(last, np.asarray(self.tokens, np.int32), np.asarray(self.logprobs, np.float32))

    def grown(self, name: str, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> EngineCoreOutput:
        """An output with what was not told before; `tokens` and `logprobs` are those of its row."""
        whole = np.concatenate([self.tokens, tokens], dtype=np.int32)  # (T,)
        known = np.concatenate([self.logprobs, logprobs], dtype=np.float32)  # (T,)
        first, self._told, self._since = self._told, len(whole), time.monotonic()
        return _with(EngineCoreOutput(request_id=name, new_token_ids=[]), whole[first:], known[first:])


def _with(output: EngineCoreOutput, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> EngineCoreOutput:
    output.new_token_ids = tokens.tolist()
    if len(logprobs):
        output.new_logprobs = LogprobsLists(
            logprob_token_ids=tokens[:, None],  # (T, 1)
            logprobs=logprobs[:, None],  # (T, 1)
            sampled_token_ranks=np.empty(0, dtype=np.int32),  # of no use here
        )
    return output
