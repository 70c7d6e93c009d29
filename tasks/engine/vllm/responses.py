"""Tokens of responses as the scheduler keeps them, and what of them is due. Imports vLLM's types of outputs."""

import time
from array import array

import numpy as np
from numpy.typing import NDArray
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from tasks.engine.vllm import EVERY

_NEVER = (1 << 40, float(1 << 40))


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
