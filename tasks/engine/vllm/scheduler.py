"""vLLM's scheduler without work for each request in each step, which answers a request once, with its whole response.

vLLM's scheduler handles every request of every step in Python, and sends every token to its client with three arrays
for its log-probability. Both take longer than a step of a small model on a card. Nobody here reads a response before it
ends, and between its prompt and its end nothing has to be decided about a request but whether it ends. So a request
whose prompt is planned becomes a row of arrays (`tasks.engine.vllm.rows`); what comes before, and every request with a
property that rows do not know, stays with vLLM's scheduler. Imports vLLM; runs in the process of the scheduler (vLLM's
`scheduler_cls`)."""

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import remove_all
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tasks.data.backends import read_backend, token_bytes
from tasks.engine.ends import END, Ends
from tasks.engine.vllm import BEGUN, STOP_TEXTS
from tasks.engine.vllm.rows import (
    COMPUTED,
    DUE,
    DUE_AT,
    FLYING,
    LIMIT,
    ROOM,
    SAMPLED,
    STEPS,
    Entry,
    Left,
    Places,
    Planned,
    Rows,
)
from tasks.engine.vllm.steps import Response, Samples, Step

_SILENT_S = 0.05  # between two messages: each costs this process and its client more than a small step
_AHEAD = 64  # tokens for which a row's blocks of the cache are reserved at once

_NO_TOKENS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)

_Blocks = tuple[list[int], ...]


class _Whole(Scheduler):
    """Keeps what is sampled until the last token. Until then an empty message is sent now and then: it shows life."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._responses: dict[str, Response] = {}
        self._dropped: list[tuple[int, EngineCoreOutput]] = []  # last outputs of requests, with their clients
        self._spoke = 0.0  # when the last message was sent
        model = self.vllm_config.model_config
        self._ends = Ends(model.get_vocab_size(), lambda: token_bytes(read_backend(Path(model.model))))
        self._rows = Rows(self.max_num_running_reqs, self.max_model_len, self._ends)
        self._with_rows = not (
            self.connector or self.ec_connector or self.num_spec_tokens or self.has_mamba_layers or self.use_pp
        )

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if not self._responses:
            self._ends.idle()
        self._responses[request.request_id] = Response(self._begin(request), request)

    def _begin(self, request: Request) -> int:
        """The line of the table of ends that holds after what is there of a response."""
        how = request.sampling_params
        if how is None:
            return 0
        told = how.extra_args or {}
        line = self._ends.first(how.stop_token_ids or (), told.get(STOP_TEXTS, ()))
        begun = told.get(BEGUN, 0)
        return self._ends.after(line, (request.prompt_token_ids or [])[-begun:]) if begun else line

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        names = list(self.requests) if request_ids is None else request_ids
        names = [names] if isinstance(names, str) else list(names)
        self._leave(self._rows.places_of(name for name in names if name in self._rows))
        ended = super().finish_requests(names, finished_status)
        for request in ended:  # the step that takes them out of the model runner sends these
            last = EngineCoreOutput(request.request_id, [], finish_reason=request.get_finished_reason())
            self._dropped.append((request.client_index, self._responses.pop(request.request_id).whole(last)))
        return ended

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self._leave_all()
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._enter()
        if not len(self._rows) or self._pause_state == PauseState.PAUSED_ALL:
            return super().schedule(throttle_prefills)
        planned = self._rows.plan()
        blocks = self._reserve(planned)
        if blocks is None:  # vLLM decides which request gives its blocks up
            self._leave_all()
            return super().schedule(throttle_prefills)
        others = self._others(planned, throttle_prefills)
        rows = self._cached(planned, blocks)
        self._rows.advance(planned)
        step = self._step(planned, rows, others)
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids = set(step.num_scheduled_tokens)
        return step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        sampled = Samples(scheduler_output, model_runner_output)
        theirs, ended = self._take(scheduler_output, sampled)
        messages = super().update_from_output(
            replace(scheduler_output, num_scheduled_tokens=theirs), sampled.some(theirs)
        )
        for message in messages.values():
            message.outputs = [last for output in message.outputs if (last := self._last(output, sampled))]
        dropped, self._dropped = self._dropped, []
        for client, last in [*ended, *dropped]:
            messages.setdefault(client, EngineCoreOutputs()).outputs.append(last)
        if not messages and time.monotonic() - self._spoke > _SILENT_S:
            messages[0] = EngineCoreOutputs()
        if messages:
            self._spoke = time.monotonic()
        return messages

    def _update_request_with_output(self, request: Request, new_token_ids: list[int]) -> tuple[list[int], bool]:
        tokens, stopped = super()._update_request_with_output(request, new_token_ids)
        response = self._responses[request.request_id]
        response.line = self._ends.after(response.line, tokens)
        if response.line == END:
            request.status, stopped = RequestStatus.FINISHED_STOPPED, True
        return tokens, stopped

    def _last(self, output: EngineCoreOutput, sampled: Samples) -> EngineCoreOutput | None:
        """The whole response if this is its end, its new tokens if they are due, else nothing."""
        name = output.request_id
        response = self._responses.get(name) or Response(0)  # none if the request failed in this step
        response.tokens.extend(output.new_token_ids)
        response.logprobs.extend(sampled.of(name, len(output.new_token_ids)))
        if output.finish_reason is None:
            return response.grown(name, _NO_TOKENS, _NO_LOGPROBS) if response.is_due() else None
        self._responses.pop(name, None)
        return response.whole(output)

    def _enter(self) -> None:
        """Make rows of requests whose prompts are planned."""
        if self._with_rows and len(self.running) > len(self._rows):
            self._rows.enter(self._entry(request) for request in self.running if self._may_enter(request))

    def _may_enter(self, request: Request) -> bool:
        return (
            request.request_id not in self._rows
            and not request.is_prefill_chunk
            and not request.async_tokens_to_discard
            and _plain(request)
        )

    def _entry(self, request: Request) -> Entry:
        return Entry(
            name=request.request_id,
            request=request,
            line=self._responses[request.request_id].line,
            computed=request.num_computed_tokens,
            sampled=request.num_output_tokens,
            flying=request.num_output_placeholders,
            limit=min(request.max_tokens, self.max_model_len - request.num_prompt_tokens),
            due=self._responses[request.request_id].due,
            due_at=self._responses[request.request_id].due_at,
        )

    def _reserve(self, planned: Planned) -> dict[str, _Blocks] | None:
        """Blocks for rows whose blocks this step would fill, by id; None if there are not enough."""
        at, _ = self._rows.places(planned.serials)
        table = self._rows.table
        short = at[table[COMPUTED, at] >= table[ROOM, at]]
        if not len(short):
            return {}
        each = self.kv_cache_manager.block_pool.get_num_free_blocks() // (
            len(short) * len(self.kv_cache_config.kv_cache_groups)
        )
        if not each:
            return None
        ahead = min(_AHEAD, (each - 1) * self.cache_config.block_size)
        return {self._rows.requests[place].request_id: self._more(place, ahead) for place in short.tolist()}

    def _more(self, place: int, ahead: int) -> _Blocks:
        """Blocks for a row's next token and up to `ahead` more."""
        request, column = self._rows.requests[place], self._rows.table[:, place]
        request.num_computed_tokens = int(column[COMPUTED])
        ahead = min(ahead, int(column[LIMIT] - column[SAMPLED] - column[FLYING]) - 1)
        request.num_in_flight_tokens += int(column[STEPS])
        blocks = self.kv_cache_manager.allocate_slots(request, 1, num_lookahead_tokens=ahead)
        request.num_in_flight_tokens -= int(column[STEPS])
        assert blocks is not None
        self._rows.table[ROOM, place] = column[COMPUTED] + 1 + ahead
        return blocks.get_block_ids()

    def _others(self, planned: Planned, throttle_prefills: bool) -> SchedulerOutput | None:
        """Plan of vLLM's scheduler for the requests that are not rows; None if there are none."""
        rows = self._rows.requests
        others = [] if len(self.running) == len(rows) else [r for r in self.running if r.request_id not in self._rows]
        waiting = bool(self.waiting or self.skipped_waiting) and len(self.running) < self.max_num_running_reqs
        if not others and not (waiting and self._pause_state == PauseState.UNPAUSED):
            return None
        limits = self.max_num_running_reqs, self.max_num_scheduled_tokens
        self.running = others
        self.max_num_running_reqs -= len(rows)
        self.max_num_scheduled_tokens -= len(planned.serials)
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_running_reqs, self.max_num_scheduled_tokens = limits
            self.running = [*rows, *self.running]

    def _cached(self, planned: Planned, blocks: dict[str, _Blocks]) -> CachedRequestData:
        """Description of a step's rows for the model runner; the second one counts by itself."""
        if self.use_v2_model_runner:
            names, at = list(blocks), self._rows.places_of(blocks)
        else:
            names, at = list(planned.scheduled), self._rows.places(planned.serials)[0]
        table = self._rows.table
        return CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[blocks.get(name) for name in names] if blocks else [None] * len(names),
            num_computed_tokens=table[COMPUTED, at].tolist(),
            num_output_tokens=(table[SAMPLED, at] + table[FLYING, at]).tolist(),
        )

    def _step(self, planned: Planned, rows: CachedRequestData, others: SchedulerOutput | None) -> Step:
        """The rows of a step and what vLLM's scheduler planned beside them."""
        if others is None:
            self.current_step += 1
            self.kv_cache_manager.new_step_starts()
            others = SchedulerOutput.make_empty()
            others.num_common_prefix_blocks = [0] * len(self.kv_cache_config.kv_cache_groups)
            others.finished_req_ids, self.finished_req_ids = self.finished_req_ids, set()
            others.preempted_req_ids, self.reset_preempted_req_ids = self.reset_preempted_req_ids, set()
            others.new_block_ids_to_zero = self._get_new_block_ids_to_zero()
        alone = not others.num_scheduled_tokens
        merged = {
            "num_scheduled_tokens": planned.scheduled if alone else planned.scheduled | others.num_scheduled_tokens,
            "total_num_scheduled_tokens": len(planned.serials) + others.total_num_scheduled_tokens,
            "scheduled_cached_reqs": _joined(rows, others.scheduled_cached_reqs),
        }
        return Step(**(vars(others) | merged), planned=planned, alone=alone)

    def _take(
        self, output: SchedulerOutput, sampled: Samples
    ) -> tuple[dict[str, int], list[tuple[int, EngineCoreOutput]]]:
        """Give the rows what a step sampled for them. Returns vLLM's own requests of the step, with their numbers of
        tokens, and outputs of rows that ended or whose new tokens are due, with the number of their client."""
        others, at, batch = output.num_scheduled_tokens, np.zeros(0, np.intp), np.zeros(0, np.intp)
        if sampled.planned is not None:
            at, still = self._rows.places(sampled.planned.serials)
            batch = sampled.rows(sampled.planned)[still]
            others = _without(others, sampled.planned, still)
        theirs, entered = {}, []
        for name, count in others.items():
            if name in self._rows:  # planned when it was not a row yet
                self.requests[name].num_in_flight_tokens -= count
                entered.append(name)
            else:
                theirs[name] = count
        if entered:
            at = np.concatenate([at, self._rows.places_of(entered)])
            batch = np.concatenate([batch, sampled.places(entered)])
        if not len(at):
            return theirs, []
        ends = self._rows.take(at, sampled.tokens(batch), sampled.logprobs(batch), len(at) - len(entered))
        due = self._rows.due(at, int(time.monotonic() * 1000))
        grown = [self._grown(place) for place in np.setdiff1d(due, ends).tolist()] if len(due) else []
        return theirs, [*grown, *self._end(np.sort(ends))]

    def _grown(self, place: int) -> tuple[int, EngineCoreOutput]:
        """New tokens of a row that goes on, with the number of its client."""
        request = self._rows.requests[place]
        response = self._responses[request.request_id]
        output = response.grown(request.request_id, *self._rows.sampled(place))
        self._rows.table[[DUE, DUE_AT], place] = response.due, response.due_at
        return request.client_index, output

    def _end(self, at: Places) -> list[tuple[int, EngineCoreOutput]]:
        """End the rows whose last token was sampled."""
        if not len(at):
            return []
        stops = self._rows.stopped(at)
        requests = self._leave(at)
        self.running = remove_all(self.running, set(requests))
        return [self._ended(request, stopped) for request, stopped in zip(requests, stops, strict=True)]

    def _ended(self, request: Request, stopped: bool) -> tuple[int, EngineCoreOutput]:
        request.status = RequestStatus.FINISHED_STOPPED if stopped else RequestStatus.FINISHED_LENGTH_CAPPED
        last = EngineCoreOutput(
            request_id=request.request_id, new_token_ids=[], finish_reason=request.get_finished_reason()
        )
        self._free_request(request)
        return request.client_index, self._responses.pop(request.request_id).whole(last)

    def _leave_all(self) -> None:
        self._leave(np.arange(len(self._rows)))

    def _leave(self, at: Places) -> list[Request]:
        """Give rows back to vLLM's scheduler, with all that happened to their requests."""
        return [self._restored(one) for one in self._rows.leave(at)] if len(at) else []

    def _restored(self, left: Left) -> Request:
        request: Request = left.request
        request.num_computed_tokens, request.num_output_placeholders = left.computed, left.flying
        request.num_in_flight_tokens += left.steps
        response = self._responses[request.request_id]
        response.tokens.frombytes(left.tokens.tobytes())
        response.logprobs.frombytes(left.logprobs.tobytes())
        response.line = left.line
        request.append_output_token_ids(left.tokens.tolist())
        self.kv_cache_manager.cache_blocks(request, min(left.computed - left.flying, request.num_tokens))
        return request


def _plain(request: Request) -> bool:
    """Nothing has to be decided about the request but whether it ends, and its log-probabilities are asked for."""
    how = request.sampling_params
    return (
        how is not None
        and how.logprobs == 0
        and how.prompt_logprobs is None
        and how.eos_token_id is None
        and not (how.min_tokens or how.stop or how.repetition_detection)
        and request.structured_output_request is None
        and request.lora_request is None
        and not request.has_encoder_inputs
        and not request.resumable
    )


def _without(scheduled: dict[str, int], planned: Planned, still: Places) -> dict[str, int]:
    """The requests of a step but for those that were rows when it was planned and are `still`."""
    if len(still) == len(scheduled):
        return {}
    names = list(planned.scheduled)
    rows = {names[index] for index in still.tolist()}
    return {name: count for name, count in scheduled.items() if name not in rows}


def _joined(rows: CachedRequestData, others: CachedRequestData) -> CachedRequestData:
    return CachedRequestData(
        req_ids=rows.req_ids + others.req_ids,
        resumed_req_ids=others.resumed_req_ids,
        new_token_ids=others.new_token_ids,
        all_token_ids=others.all_token_ids,
        new_block_ids=rows.new_block_ids + others.new_block_ids,
        num_computed_tokens=rows.num_computed_tokens + others.num_computed_tokens,
        num_output_tokens=rows.num_output_tokens + others.num_output_tokens,
    )


class WholeResponses(_Whole):
    """For a scheduler that waits for each step."""


class WholeResponsesAhead(_Whole, AsyncScheduler):
    """For one that plans the next step while one is computed (`async_scheduling`)."""
