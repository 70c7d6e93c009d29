"""The rollout engine: vLLM as a server of requests, which samples, scores, and loads new weights in place. vLLM and
torch are imported when an engine is created."""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.errors import InputError, SyncMismatch, WorkerLost
from storage.parts import list_column
from tasks.config.environment import set_engine_meeting_place
from tasks.engine.protocol import (
    COMPLETIONS,
    NOTHING,
    ROUTES,
    Arrived,
    Begun,
    Collected,
    EngineIdentity,
    EngineProtocol,
    EngineSpec,
    Every,
    Finished,
    Increment,
    InFlight,
    Sampling,
    TokenIds,
    unusable_weights,
)
from tasks.engine.vllm import Runner
from tasks.engine.vllm.transaction import Transaction
from trainer_core.collector import paused
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import WeightPlan

if TYPE_CHECKING:
    from tasks.engine.vllm.core import Answer

logger = logging.getLogger(__name__)


def imported() -> ModuleType:
    """The module that imports vLLM, for seconds."""
    with paused():
        from tasks.engine.vllm import core
    return core


@dataclass(frozen=True)
class Unusable:
    """Why an engine must not generate."""

    reason: str


class Batch:
    """Requests that were queued together."""

    def __init__(
        self, number: int, prompts: Sequence[TokenIds], how: Sequence[Any], begun: Sequence[Begun] = (), name: str = ""
    ) -> None:
        self.number, self.prompts, self.how, self.name = number, prompts, how, name
        self.begun = begun or [NOTHING] * len(prompts)
        self.told = [len(one.tokens) for one in self.begun]  # tokens of each response that the caller knows
        self.answers: list[Any] = [None] * len(prompts)  # an `Answer` each, once it is there
        self.left = len(prompts)
        self.requests: Sequence[str] = ()  # their names, once they are under way
        self.weight_version: int | None = None

    def grown(self, row: int, answer: "Answer", known: int = 0, last: int = 0) -> Increment:
        """The growth of a response by the answer, without so many tokens at its begin and at its end."""
        one = slice(known, len(answer.token_ids) - last)
        grown, first = Begun(answer.token_ids[one], answer.logprobs[one]), self.told[row]
        self.told[row] += len(grown.tokens)
        return Increment(self.number, row, first, grown, self.weight_version)

    def rest(self) -> Iterator[Increment]:
        """The growth that the caller does not know of the responses, all of which have ended or were dropped."""
        for row, answer in enumerate(self.answers):
            known = self.told[row] - len(self.begun[row].tokens)
            one = self.grown(row, answer, known, last=int(answer.finish_reason != "abort"))
            if len(one.grown.tokens):
                yield one


class Engine(EngineProtocol):
    """vLLM, here or in processes that this one starts."""

    def __init__(self, spec: EngineSpec, meeting_place: str | None = None) -> None:
        """Start the engine with the weights in `spec.model_dir`; the processes that it starts meet in the empty folder
        `meeting_place`. Raises InputError: the directory holds no model."""
        if not (Path(spec.model_dir) / "config.json").is_file():
            raise InputError(f"{spec.model_dir} holds no config.json: give a Hugging Face model directory")
        if meeting_place is not None:
            set_engine_meeting_place(meeting_place)
        core = imported()
        self._spec = spec
        self._waiting: deque[Batch] = deque()
        self._running: dict[str, tuple[Batch, int]] = {}
        self._names = itertools.count()
        self._sampling_parameters: Callable[[Sampling, int, int, Every | None], Any] = core.sampling_parameters
        self._scoring_parameters: Callable[[], Any] = core.scoring_parameters
        self._core = core.Core(spec)
        logger.info("the engine of %s has vLLM's %s model runner", spec.model_dir, self._core.runner)
        self._held: EngineIdentity | Unusable = EngineIdentity(weight_version=None, weights_digest=None)
        self._digests: dict[str, str] = {}  # of what was committed
        self._base: str | None = None  # digest of the frozen weights that were committed, for adapters
        self._update: Transaction | None = None
        self._on_hold = False
        self._finished: list[Batch] = []  # with `_ended` responses, and not collected yet
        self._ended = 0
        self._grown: list[Increment] = []  # not collected yet
        self._given: list[Increment] = []  # collected last: whoever did may not have kept them
        self._left: dict[str, list[Increment]] = {}  # of what was dropped since the last `drop`

    def identity(self) -> EngineIdentity:
        if isinstance(self._held, Unusable):
            return EngineIdentity(weight_version=None, weights_digest=None)
        return self._held

    def runner(self) -> Runner:
        """The model runner: the second on a card, for every family."""
        return self._core.runner

    def generate(self, prompts: Sequence[TokenIds], seeds: Sequence[int], sampling: Sampling) -> pa.RecordBatch:
        self._drop()
        self.enqueue(0, prompts, seeds, sampling)
        return self._result(self._complete()).completions

    def enqueue(
        self,
        number: int,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        sampling: Sampling,
        begun: Sequence[Begun] = (),
        every: Every | None = None,
        name: str = "",
    ) -> None:
        self._check_usable()
        self._spec.check_batch(number, prompts)
        begun = begun or [NOTHING] * len(prompts)
        how = [
            self._sampling_parameters(sampling, seed, len(one.tokens), every)
            for seed, one in zip(seeds, begun, strict=True)
        ]
        self._waiting.append(Batch(number, prompts, how, begun, name))
        self._admit()

    def collect(self, wait_s: float) -> Collected:
        deadline = time.monotonic() + wait_s
        finished, ended = self._finished, self._ended
        self._finished, self._ended = [], 0
        while self._running and not finished and not self._on_hold:
            samples, batches = self._step()
            ended += samples
            finished += batches
            if time.monotonic() >= deadline:
                break
        self._given, self._grown = self._grown, []
        return Collected([self._result(batch) for batch in finished], ended, self._given)

    def drop(self) -> dict[str, list[Increment]]:
        self._drop()
        left, self._left = self._left, {}
        return left

    def score(self, sequences: Sequence[TokenIds]) -> list[NDArray[np.float32]]:
        self._check_usable()
        self._spec.check_lengths(sequences, "sequence")
        self._drop()
        if not len(sequences):
            return []
        self._waiting.append(Batch(0, sequences, [self._scoring_parameters() for _ in sequences]))
        self._admit()
        batch = self._complete()
        self._take_routes(dict.fromkeys(batch.requests, 0))
        return [answer.prompt_logprobs for answer in batch.answers]

    def survey_model(self) -> str | None:
        self._core.workers("survey_model")
        return self._base

    def prepare_update(
        self, plan: str, digest: str, channel: Channel, first_receiver: int, in_flight: InFlight = "abort"
    ) -> str:
        self._update = None
        update = self._transaction(plan)
        update.prepare(plan, digest, channel, first_receiver)
        self._settle(in_flight)
        self._update = update
        return digest

    def receive_update(self) -> Arrived:
        if self._update is None:
            raise SyncMismatch("no weight update was prepared, so none can be received; sync the weights again")
        before, self._held = self._held, Unusable("a weight update began and did not finish")
        if self._update.form == "base":
            self._base = None
        try:
            return self._update.receive()
        except Exception as error:
            self._held = Unusable(str(error)) if self._update.touched else before
            raise

    def commit_update(self, version: int, weights_digest: str) -> EngineIdentity:
        if self._update is None or not self._update.holds(weights_digest):
            raise SyncMismatch(f"weights {weights_digest} were not received, so they cannot be served; sync them again")
        self._core.forget_prompts()
        committed = EngineIdentity(weight_version=version, weights_digest=weights_digest)
        update, self._update = self._update, None
        self._held, self._digests = committed, update.digests
        if update.form == "base":  # requests on hold wait for the adapter
            self._base, self._held = update.base, Unusable("the frozen weights are here, and no adapter yet")
        else:
            self._go_on()
        return committed

    def abort_update(self, reason: str) -> bool:
        if self._update is not None:
            update, self._update = self._update, None
            if update.touched:
                self._held = Unusable(reason)
            update.forget()
            self._go_on()
        if isinstance(self._held, Unusable):
            self._drop()
        return not isinstance(self._held, Unusable)

    def refuse(self, reason: str) -> None:
        self._drop()
        self._held = Unusable(reason)

    def held(self) -> dict[str, str]:
        if self.identity().weights_digest is None:
            return {}
        if self._core.asleep:  # to wake it would take the card's memory from a trainer
            return dict(self._digests)
        changed: dict[str, str] = {}
        for worker in self._core.workers("changed_tensors"):
            changed |= worker
        return self._digests | changed

    def sleep(self) -> bool:
        if self._spec.sleeps:
            self._drop()
            self._core.sleep()
        return self._spec.sleeps

    def wake(self) -> None:
        self._core.wake()

    def _transaction(self, plan: str) -> Transaction:
        """An update of this plan. Raises SyncMismatch: its adapter belongs to other frozen weights."""
        if self._spec.adapter is None:
            return Transaction(self._core.workers)
        planned = WeightPlan.model_validate_json(plan)
        if planned.form == "adapter" and planned.base != self._base:
            raise SyncMismatch(
                f"the adapter of the update belongs to the frozen weights {planned.base}, and the engine has "
                f"{self._base} (None: none that an update brought): sync the weights again"
            )
        return Transaction(self._core.workers, planned.form, planned.base)

    def _drop(self) -> None:
        """Forget what was queued, and note what was sampled of it."""
        self._waiting.clear()
        batches = {one.number: one for one in (*self._finished, *(batch for batch, _ in self._running.values()))}
        if self._running:
            self._core.forget(list(self._running))
        if self._on_hold:  # whoever began that update is gone
            self._on_hold = False
            self._core.go_on()
        while self._running:
            self._step(admit=False)
        self._take_routes({name: 0 for batch in batches.values() for name in batch.requests})
        grown = [*self._given, *self._grown]
        for batch in batches.values():
            own = [*(one for one in grown if one.number == batch.number), *batch.rest()]
            if batch.name and own:
                self._left.setdefault(batch.name, []).extend(own)
        self._finished, self._ended, self._grown, self._given = [], 0, [], []

    def _settle(self, in_flight: InFlight) -> None:
        """Drop, finish or hold what is under way."""
        match in_flight:
            case "abort":
                self._drop()
            case "wait":
                while self._running:
                    samples, batches = self._step(admit=False)
                    self._ended += samples
                    self._finished += batches
            case "keep":
                self._core.hold()
                self._on_hold = True

    def _go_on(self) -> None:
        """Compute again what was held, and begin with what waits."""
        if self._on_hold:
            self._on_hold = False
            self._core.go_on()
        if not isinstance(self._held, Unusable):
            self._admit()

    def _admit(self) -> None:
        """Begin with what waits: all of it, or the next batch once none is under way."""
        while self._waiting and not (self._spec.together and self._running):
            batch = self._waiting.popleft()
            batch.weight_version = self.identity().weight_version
            named = {f"{next(self._names)}": (batch, row) for row in range(len(batch.prompts))}
            self._running |= named
            batch.requests = list(named)
            # plain integers: from numpy's, vLLM would make tensors of a type that it does not accept
            begun = zip(batch.prompts, batch.begun, strict=True)
            prompts = [[*np.asarray(prompt).tolist(), *one.tokens.tolist()] for prompt, one in begun]
            self._core.add(list(zip(named, prompts, batch.how, strict=True)))

    def _step(self, admit: bool = True) -> tuple[int, list[Batch]]:
        """Responses that ended in one step, and the batches that are finished with them; `admit` begins what waits."""
        ended, finished = 0, []
        for answer in self._core.step():
            if answer.finish_reason is None:
                batch, row = self._running[answer.name]
                self._grown.append(batch.grown(row, answer))
                continue
            batch, row = self._running.pop(answer.name)
            batch.answers[row] = answer
            batch.left -= 1
            ended += 1
            if not batch.left:
                finished.append(batch)
        if admit:
            self._admit()
        return ended, finished

    def _complete(self) -> Batch:
        """The one batch that is under way, with its answers."""
        finished: list[Batch] = []
        while not finished:
            finished += self._step()[1]
        return finished[0]

    def _result(self, batch: Batch) -> Finished:
        cached, completions = sum(one.cached for one in batch.answers), _completions(batch.answers, batch.begun)
        if self._spec.routes:
            prompts, responses = map(len, batch.prompts), completions["response_tokens"].value_lengths().to_pylist()
            # the last token was sampled, and never given to the model
            counts = [prompt + response - 1 for prompt, response in zip(prompts, responses, strict=True)]
            routes = self._take_routes(dict(zip(batch.requests, counts, strict=True)))
            completions = completions.append_column(ROUTES, pa.array(routes, ROUTES.type))
        return Finished(batch.number, completions, batch.weight_version, (cached, self._core.block))

    def _take_routes(self, counts: dict[str, int]) -> list[bytes]:
        return self._core.workers("take_routes", counts=counts)[0] if self._spec.routes and counts else []

    def _check_usable(self) -> None:
        if isinstance(self._held, Unusable):
            raise unusable_weights(self._held.reason)


def _completions(answers: Sequence["Answer"], begun: Sequence[Begun]) -> pa.RecordBatch:
    unknown = [one.finish_reason for one in answers if one.finish_reason not in ("stop", "length", "abort")]
    if unknown:
        raise WorkerLost(f"vLLM ended a response with finish_reason {unknown[0]!r}, which Ratchet does not know")
    rest = (Begun(answer.token_ids, answer.logprobs) for answer in answers)
    whole = [one.grown(more) for one, more in zip(begun, rest, strict=True)]
    columns = [
        list_column([one.tokens for one in whole], pa.int32()),
        list_column([one.logprobs for one in whole], pa.float32()),
        pa.array([answer.finish_reason for answer in answers], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=COMPLETIONS)
