"""Scoring in separate processes, with a deadline per sample.

A signal alarm does not work outside the main thread, and a function that hangs or crashes in our own process would take
the run down. So each scoring process is a child that is killed when it overruns, and the next one continues.
"""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from storage.errors import StageFailed
from tasks.config.code_version import PROJECT_ROOT
from tasks.config.environment import child_python_path

START_DEADLINE_S = 60.0

Sample = tuple[Mapping[str, Any], str]


@dataclass(frozen=True)
class Score:
    """One sample's result. `reward` is None unless `status` is ok."""

    reward: float | None
    status: str
    detail: str


@dataclass(frozen=True)
class ScoringOrder:
    """What scoring processes are started with."""

    function: str
    arguments: Mapping[str, Any]
    deadline_s: float


def score_in_processes(order: ScoringOrder, samples: Sequence[Sample], processes: int) -> list[Score]:
    """Score `samples` in order, in `processes` children at a time."""
    size = -(-len(samples) // processes) if samples else 1
    chunks = [samples[start : start + size] for start in range(0, len(samples), size)]
    with ThreadPoolExecutor(processes) as threads:
        return [score for scores in threads.map(lambda chunk: _score_chunk(order, chunk), chunks) for score in scores]


def _score_chunk(order: ScoringOrder, samples: Sequence[Sample]) -> list[Score]:
    scores: list[Score] = []
    while len(scores) < len(samples):
        with _Child(order) as child:
            for record, response in samples[len(scores) :]:
                score = child.score(record, response)
                scores.append(score)
                if score.status in ("timeout", "crash"):
                    break
    return [Score(None, "error", s.detail) if s.status == "crash" else s for s in scores]


class _Child:
    """One scoring process and the thread that reads its answers."""

    def __init__(self, order: ScoringOrder) -> None:
        self._order = order
        self._answers: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> "_Child":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tasks.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=PROJECT_ROOT,
            env=child_python_path(),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._send({"function": self._order.function, "arguments": dict(self._order.arguments)})
        ready = self._answer(START_DEADLINE_S)
        if ready.status != "ready":
            self.__exit__()
            raise StageFailed(f"a scoring process for {self._order.function!r} did not start: {ready.detail}")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def score(self, record: Mapping[str, Any], response: str) -> Score:
        self._send({"record": dict(record), "response": response})
        return self._answer(self._order.deadline_s)

    def _answer(self, deadline_s: float) -> Score:
        try:
            line = self._answers.get(timeout=deadline_s)
        except queue.Empty:
            return Score(None, "timeout", f"no score within {deadline_s} s")
        if not line:
            return Score(None, "crash", f"the scoring process ended with code {self._process.wait()}")
        return Score(**json.loads(line))

    def _send(self, value: dict[str, Any]) -> None:
        if self._process.stdin is None:
            raise StageFailed("the scoring process has no standard input")
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # the reader sees the end of the process and reports it

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._answers.put(line)
        self._answers.put("")
