"""A judge that is an engine of the run: its model's chat template renders a question, and the engine samples."""

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa

from storage.digest import value_digest
from storage.errors import RatchetError
from tasks.data.backends import Chat
from tasks.data.tokenizer import TextCodec
from tasks.engine.protocol import EngineProtocol, Sampling
from tasks.rewards.judge import Unanswered
from tasks.rewards.sample import failed

_WAIT_S = 0.05  # for which a call waits for answers, before new questions join
_SEEDS = 1 << 31


class _Question(NamedTuple):
    prompt: Sequence[int]
    seed: int
    how: Sampling
    answer: "Future[pa.RecordBatch]"


@dataclass(eq=False)
class Questions:
    """Questions of several threads to one engine, each a batch of its own: on an engine that samples one batch after
    another the answer depends on nothing but the question and its seed."""

    reading: threading.Lock = field(default_factory=threading.Lock)
    """Held while the judge's tokenizer, which is not made for several threads, is used."""
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _waiting: deque[_Question] = field(default_factory=deque[_Question])
    _asked: dict[int, _Question] = field(default_factory=dict[int, _Question])
    _count: int = 0
    _engine: EngineProtocol | None = None

    def ask(
        self, start: Callable[[], EngineProtocol], prompt: Sequence[int], seed: int, how: Sampling
    ) -> pa.RecordBatch:
        """The answer, as a row of schema `COMPLETIONS`, of the engine that `start` finds. One of the threads that wait
        calls the engine for all. Raises what `start` or the engine raises, in each thread that waited."""
        question = _Question(prompt, seed, how, Future())
        self._waiting.append(question)
        while not question.answer.done():
            with self._turn:
                if not question.answer.done():
                    self._served(start)
        return question.answer.result()

    def _served(self, start: Callable[[], EngineProtocol]) -> None:
        try:
            self._step(start)
        except RatchetError as failure:
            lost = [*self._asked.values(), *self._waiting]
            self._asked.clear()
            self._waiting.clear()
            for question in lost:
                question.answer.set_exception(failure)

    def _step(self, start: Callable[[], EngineProtocol]) -> None:
        if not self._asked or self._engine is None:
            self._engine = start()
            self._engine.drop()  # what a killed process has asked an engine that it left
        while self._waiting:
            question = self._waiting[0]
            self._count += 1
            self._engine.enqueue(self._count, [question.prompt], [question.seed], question.how)
            self._asked[self._count] = self._waiting.popleft()
        for one in self._engine.collect(_WAIT_S).finished:
            self._asked.pop(one.number).answer.set_result(one.completions)


@dataclass(frozen=True)
class EngineJudge:
    """The engine of `[engines.judge]`."""

    model: str  # identity of its weights, tokenizer and precision
    longest: int  # question and answer, in tokens
    questions: Questions
    read: Callable[[], TextCodec]
    start: Callable[[], EngineProtocol]
    exact = True

    @property
    def name(self) -> str:
        return f"engines.judge:{self.model}"

    def answer(self, request: str, attempt: int) -> str:
        body = json.loads(request)
        with self.questions.reading:
            prompt = self._codec.encode(self._codec.render(Chat(body["messages"]), answering=True))
        if len(prompt) >= self.longest:
            detail = f"the question has {len(prompt)} tokens, and engines.judge.max_model_len is {self.longest}"
            raise Unanswered(failed("exception", f"{detail}: raise it in a new run, or shorten the rubric"), final=True)
        settings, stop = {name: body[name] for name in ("temperature", "max_tokens")}, self._codec.stop_tokens
        how = Sampling(**settings, stop_token_ids=stop)
        seed = int(value_digest([self.name, body, attempt]), 16) % _SEEDS
        row = self.questions.ask(self.start, prompt, seed, how)
        with self.questions.reading:
            (text,) = self._codec.decode_batch([row["response_tokens"][0].as_py()])
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": row["finish_reason"][0].as_py()}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(row["logprobs"][0])}
        return json.dumps({"choices": [choice], "usage": usage})  # as an OpenAI-compatible address

    @cached_property
    def _codec(self) -> TextCodec:
        return self.read()
