"""The bare side of the benches of rollouts and of conversations: vLLM's `LLM` alone in this process.

    python -m infra.bench.bare_engine SPEC

reads requests, one JSON object a line, from standard input and answers each with its cost.
"""

import heapq
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil
from pydantic import BaseModel

from tasks.engine.protocol import EngineSpec, Sampling
from tasks.engine.vllm import Runner

ANSWER = "bare-engine:"
"""Marks the output lines that are answers; vLLM and its processes may print others."""


class Requests(BaseModel):
    """Requests of one round."""

    prompts: list[list[int]]
    """Token ids."""
    seeds: list[int]
    """One for each prompt."""
    sampling: Sampling
    """Sampling parameters."""
    plain: bool = False
    """Sample without seeds and log-probabilities; bare vLLM alone knows it."""


class Session(BaseModel):
    """Turns of one conversation that was recorded."""

    prompts: list[list[int]]
    """Token ids before each answer."""
    seed: int
    """Seed of all answers."""


class Sessions(BaseModel):
    """Conversations of one round. A turn is asked `wait_s` after the answer before it has ended."""

    sessions: list[Session]
    wait_s: float
    """Seconds of the tool."""
    sampling: Sampling
    """Sampling parameters."""


class Took(BaseModel):
    """Cost of one round."""

    seconds: float
    """Seconds on the wall clock."""
    processor_s: float
    """Processor time of all processes of the side."""
    lengths: list[int]
    """Tokens of each response."""
    runner: Runner
    """The model runner of the side."""

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        return sum(self.lengths)


def processor_seconds(process: psutil.Process) -> float:
    """Processor time of a process and its descendants so far."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def _parameters(sampling: Sampling, seeds: Sequence[int], plain: bool = False) -> list[Any]:
    from vllm.sampling_params import RequestOutputKind

    from tasks.engine.vllm.core import sampling_parameters

    found = [sampling_parameters(sampling, seed) for seed in seeds]
    for one in found:  # settings of vLLM that make its own client cheap
        one.output_kind = RequestOutputKind.FINAL_ONLY
        one.flat_logprobs = True  # lists of numbers instead of a dict and objects per token
        one.detokenize = False
        if plain:
            one.seed = one.logprobs = None
    return found


def _generated(engine: Any, asked: Requests) -> list[int]:
    """Length of each response."""
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in asked.prompts]
    outputs = engine.generate(prompts, _parameters(asked.sampling, asked.seeds, asked.plain), use_tqdm=False)
    return [len(output.outputs[0].token_ids) for output in outputs]


def _conversed(engine: Any, asked: Sessions) -> list[int]:
    """Length of each answer, in the order of their ends."""
    core, lengths = engine.llm_engine, list[int]()
    due = [(0.0, place, 0) for place in range(len(asked.sessions))]  # time, session and turn
    while due or core.has_unfinished_requests():
        now = time.perf_counter()
        while due and due[0][0] <= now:
            _, place, turn = heapq.heappop(due)
            session = asked.sessions[place]
            (how,) = _parameters(asked.sampling, [session.seed])
            core.add_request(f"{place}/{turn}", {"prompt_token_ids": session.prompts[turn]}, how)
        if not core.has_unfinished_requests():
            time.sleep(max(0.0, due[0][0] - now))
            continue
        for output in core.step():
            if output.finished:
                lengths.append(len(output.outputs[0].token_ids))
                place, turn = map(int, output.request_id.split("/"))
                if turn + 1 < len(asked.sessions[place].prompts):
                    heapq.heappush(due, (time.perf_counter() + asked.wait_s, place, turn + 1))
    return lengths


def main() -> None:
    """Answer until standard input ends."""
    from vllm import LLM

    from tasks.engine.vllm.core import vllm_arguments

    engine = LLM(**vllm_arguments(EngineSpec.model_validate_json(sys.argv[1])))
    runner: Runner = "second" if engine.llm_engine.vllm_config.use_v2_model_runner else "first"
    this = psutil.Process()
    for line in sys.stdin:
        asked = Sessions.model_validate_json(line) if '"sessions"' in line else Requests.model_validate_json(line)
        clock, used = time.perf_counter(), processor_seconds(this)
        lengths = _conversed(engine, asked) if isinstance(asked, Sessions) else _generated(engine, asked)
        seconds, processor_s = time.perf_counter() - clock, processor_seconds(this) - used
        took = Took(seconds=seconds, processor_s=processor_s, lengths=lengths, runner=runner)
        sys.stdout.write(f"{ANSWER}{took.model_dump_json()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
