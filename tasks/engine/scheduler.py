"""vLLM's scheduler, which answers a request once, with its whole response.

vLLM sends every token of every request to the process of its client as soon as it is sampled, with three arrays for its
log-probability. Writing and reading those messages costs the scheduler and the client about as much processor time as a
step of a small model takes. Nobody here reads a response before it ends, so it stays with the scheduler until then.

Imports vLLM; runs in the process of the scheduler (vLLM's `scheduler_cls`).
"""

from array import array
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


class _Response:
    """What of a response has been sampled."""

    def __init__(self) -> None:
        self.tokens, self.logprobs = array("i"), array("f")  # 8 bytes a token: objects of Python take ten times that

    def whole(self, last: EngineCoreOutput) -> EngineCoreOutput:
        """The last output of the request, with all tokens and, if they were asked for, their log-probabilities."""
        last.new_token_ids = self.tokens.tolist()
        if self.logprobs:
            last.new_logprobs = LogprobsLists(
                logprob_token_ids=np.asarray(self.tokens, dtype=np.int32)[:, None],  # (T, 1)
                logprobs=np.asarray(self.logprobs, dtype=np.float32)[:, None],  # (T, 1)
                sampled_token_ranks=np.empty(0, dtype=np.int32),  # of no use here
            )
        return last


class _Sampled:
    """Log-probabilities of the tokens that a step has sampled."""

    def __init__(self, found: ModelRunnerOutput) -> None:
        self._places = found.req_id_to_index
        self._firsts = found.logprobs.cu_num_generated_tokens if found.logprobs else None
        self._values: list[float] = found.logprobs.logprobs[:, 0].tolist() if found.logprobs else []

    def of(self, name: str, tokens: int) -> list[float]:
        """Those of a request, for each of its tokens in this step; none if the step has not computed any."""
        place = self._places.get(name, 0)
        first = place if self._firsts is None else self._firsts[place]
        return self._values[first : first + tokens]


class _Whole(Scheduler):
    """Keeps what is sampled until the last token. Every step sends a message, if an empty one: it shows life."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._responses: dict[str, _Response] = {}

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._responses[request.request_id] = _Response()

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._responses.pop(request.request_id, None)
        return ended

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        sampled = _Sampled(model_runner_output)
        bare = replace(model_runner_output, logprobs=None)  # or vLLM would cut three arrays for each token
        messages = super().update_from_output(scheduler_output, bare)
        for message in messages.values():
            message.outputs = [last for output in message.outputs if (last := self._last(output, sampled))]
        return messages

    def _last(self, output: EngineCoreOutput, sampled: _Sampled) -> EngineCoreOutput | None:
        """The whole response if this is its end, else nothing."""
        name = output.request_id
        response = self._responses.get(name) or _Response()  # none if the request failed in this step
        response.tokens.extend(output.new_token_ids)
        response.logprobs.extend(sampled.of(name, len(output.new_token_ids)))
        if output.finish_reason is None:
            return None
        self._responses.pop(name, None)
        return response.whole(output)


class WholeResponses(_Whole):
    """For a scheduler that waits for each step."""


class WholeResponsesAhead(_Whole, AsyncScheduler):
    """For one that plans the next step while one is computed (`async_scheduling`)."""
