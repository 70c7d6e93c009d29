"""One conversation of a policy with an environment: its state, which follows from its events alone, and its play.

Each event is durable before anything follows from it, so another process goes on where this one was lost.
"""

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from storage.errors import InputError
from storage.unfinished import Grown, IncrementRecord, TurnEvent
from tasks.data.backends import Message
from tasks.data.chat import ASSISTANT
from tasks.data.tokenizer import TextCodec
from tasks.engine.protocol import Sampling, TokenIds
from tasks.environments.calls import Reader, read_by, recorded
from tasks.environments.hosting import EnvironmentFailed, Host, Opened
from tasks.environments.rendering import Renderer
from tasks.environments.sampler import Sampler
from tasks.environments.scores import Course, Failure, Kept, PlayedScore
from tasks.environments.trajectory import Answer, Trajectory

Note = Callable[[TurnEvent], Awaitable[None]]  # returns when the event is durable


@dataclass(frozen=True)
class Limits:
    turns: int
    tokens: int | None
    seconds: float
    retries: int
    context: int  # longest sequence of the engine, in tokens


class Task(NamedTuple):
    row: int  # place in its piece
    prompt_id: str
    sample_id: int
    record: Mapping[str, Any]
    prompt: TokenIds  # stands for the first observation where there never was one
    seed: int  # of the policy
    world: int  # seed of the environment

    def __str__(self) -> str:
        return f"prompt {self.prompt_id!r}, sample {self.sample_id}"


class Played(NamedTuple):
    trajectory: Trajectory
    kept: Kept


class Conversation:
    def __init__(self, codec: TextCodec, renderer: Renderer, limits: Limits) -> None:
        self._codec, self._renderer, self._limits = codec, renderer, limits
        self.failures: list[TurnEvent] = []
        self._clear()

    def _clear(self) -> None:
        self.events: list[TurnEvent] = []  # of the present environment
        self.trajectory: Trajectory | None = None
        self.messages: list[Message] = []
        self.action = ""
        self.rewritten = 0  # as `PlayedScore.rewritten`
        self._opened: str | None = None  # `Following.text` of all messages before the last answer
        self.open = self.ended = False

    @property
    def goes_on(self) -> bool:
        """True if another environment can take the place of the present one."""
        return bool(self.events) and self.events[0].goes_on

    @property
    def spent(self) -> float:
        """Seconds of the environment."""
        return sum(event.seconds for event in self.events if event.kind != "called")

    @property
    def room(self) -> int:
        """Tokens that can follow."""
        trajectory, tokens = self._there, self._limits.tokens
        left = self._limits.context - len(trajectory.prompt) - trajectory.length
        return left if tokens is None else min(left, tokens - trajectory.length)

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The finished turns, as `protocol.Turn`."""
        found, observation = [], self.events[0].messages
        for called, told in zip(self.events[1::2], self.events[2::2], strict=False):
            action, calls = self._text(answer_of(called).tokens), json.loads(called.calls or "[]")
            found.append({"observation": observation, "action": action, "reward": told.reward, "calls": calls})
            observation = told.messages
        return found

    def add(self, event: TurnEvent) -> None:
        """Go on by an event. Raises InputError: its messages cannot be rendered, or leave no room for an answer."""
        match event.kind:
            case "begun":
                self._begin(event)
            case "called":
                self._answer(event)
            case "told":
                self._observe(event)
            case "failed":
                self._fail(event)

    @property
    def _there(self) -> Trajectory:
        assert self.trajectory is not None
        return self.trajectory

    def _begin(self, event: TurnEvent) -> None:
        self._clear()
        self.messages = list(event.messages or ())
        self.trajectory = Trajectory(self._renderer.first(self.messages, event.tools))
        if self.room < 1:
            raise InputError(
                f"the first observation has at least {len(self.trajectory.prompt)} tokens, which leaves no room for an "
                f"answer: engine.max_model_len is {self._limits.context}"
            )
        self.events = [event]

    def _answer(self, event: TurnEvent) -> None:
        answer = answer_of(event)
        self._there.answer(answer, **({"calls": event.calls} if event.calls else {}))
        self.action, self.open = self._text(answer.tokens), True
        self.messages.append({"role": ASSISTANT, "content": self.action})
        self.events.append(event)

    def _observe(self, event: TurnEvent) -> None:
        new = list(event.messages or ())
        self.ended = event.done or self._there.answers >= self._limits.turns
        if not self.ended:
            last = int(self._there.tokens[-1])
            tokens, kept, self._opened = self._renderer.after(
                self.messages, new, self.events[0].tools, last, self._opened
            )
            self.rewritten += not kept
            if len(tokens) < self.room:
                self._there.observe(tokens, _role(new), results=_results(new))
            else:
                self.ended = True
        self.open = False
        self.messages += new
        self.events.append(event)

    def _fail(self, event: TurnEvent) -> None:
        self.failures.append(event)
        kept = self.events[: -1 if self.open else None] if event.goes_on else []
        self._clear()
        for one in kept:
            self.add(one)

    def _text(self, tokens: TokenIds) -> str:
        return self._codec.decode_batch([tokens])[0]


@dataclass(frozen=True)
class Player:
    host: Host
    sampler: Sampler
    sampling: Sampling
    codec: TextCodec
    renderer: Renderer
    limits: Limits
    reader: Reader

    async def play(self, task: Task, past: Sequence[TurnEvent], note: Note) -> Played:
        """The trajectory of a conversation, with its rewards and failures.

        Args:
            past: its events so far, of processes that were lost.
            note: called with each new event.
        """
        conversation = Conversation(self.codec, self.renderer, self.limits)
        for event in past:
            conversation.add(event)
        if conversation.open:
            unknown = f"{task}: the process that called the environment was lost, so the outcome is not known"
            await self._failed(conversation, note, EnvironmentFailed("exit", unknown))
        while not conversation.ended and len(conversation.failures) <= self.limits.retries:
            try:
                async with await self.host.open() as opened:
                    await self._go_on(task, conversation, opened, note)
            except EnvironmentFailed as failure:
                await self._failed(conversation, note, failure)
        return _result(task, conversation)

    async def _failed(self, conversation: Conversation, note: Note, failure: EnvironmentFailed) -> None:
        goes_on = conversation.goes_on and not failure.restoring
        spent = failure.seconds + (0.0 if goes_on else conversation.spent)  # of turns that no other one goes on with
        event = failed_with(failure, seconds=spent, goes_on=goes_on)
        conversation.add(event)
        await note(event)

    async def _go_on(self, task: Task, conversation: Conversation, opened: Opened, note: Note) -> None:
        await self._begin(task, conversation, opened, note)
        while not conversation.ended:
            trajectory = conversation.trajectory
            assert trajectory is not None
            most = min(self.sampling.max_tokens, conversation.room)
            sampling = self.sampling.model_copy(update={"max_tokens": most})
            clock = time.monotonic()
            answer = await self.sampler.sample(trajectory.tokens, task.seed, sampling)
            took, calls = since(clock), await self._calls(answer, conversation)
            await self._note(conversation, note, called_with(answer, seconds=took, calls=calls))
            asked = {"action": conversation.action, **({"calls": json.loads(calls or "[]")} if self.host.reads else {})}
            told = await self._ask(task, conversation, opened, f"turn {trajectory.answers}", **asked)
            if told["done"] and told["reward"] is None:
                raise EnvironmentFailed("no_number", f"{task}: the environment could not judge the last answer")
            await self._note(conversation, note, _event("told", told))

    async def _calls(self, answer: Answer, conversation: Conversation) -> str:
        """The calls of tools in an answer, as JSON; empty if there are none, or the environment does not take them."""
        if not self.host.reads:
            return ""
        text, tools = self.renderer.text(answer.tokens.tolist()), conversation.events[0].tools
        found = recorded(await read_by(self.reader, text, tools))
        return json.dumps(found) if found else ""

    async def _begin(self, task: Task, conversation: Conversation, opened: Opened, note: Note) -> None:
        """Begin, or go on after the turns that there are."""
        asked: dict[str, Any] = {"record": dict(task.record), "seed": task.world, "state": None, "turns": []}
        if not conversation.goes_on:
            begun = await self._ask(task, conversation, opened, "its beginning", **asked)
            await self._note(conversation, note, _event("begun", begun))
            return
        state = conversation.events[-1].state
        asked |= {"turns": conversation.turns} if state is None else {"state": state}
        try:
            there = await self._ask(task, conversation, opened, "its going on", **asked)
        except EnvironmentFailed as failure:
            failure.restoring = True
            raise
        if state is None and there["messages"] != list(conversation.events[0].messages or ()):
            fact = f"{task}: its reset gave another observation than at its beginning, with the same record and seed"
            raise EnvironmentFailed("exception", f"{fact}: the turns after that do not belong to it", restoring=True)

    async def _ask(self, task: Task, conversation: Conversation, opened: Opened, what: str, **asked: Any) -> Any:
        clock, left = time.monotonic(), max(0.0, self.limits.seconds - conversation.spent)
        try:
            answer = await opened.ask(left, f"{what} of {task}", **asked)
        except EnvironmentFailed as failure:
            failure.seconds = since(clock)
            raise
        return {**answer, "messages": _messages(answer.pop("observation", None)), "seconds": since(clock)}

    async def _note(self, conversation: Conversation, note: Note, event: TurnEvent) -> None:
        try:
            conversation.add(event)
        except InputError as error:
            raise EnvironmentFailed("exception", str(error)) from None
        await note(event)


def _result(task: Task, conversation: Conversation) -> Played:
    rewards = tuple(event.reward for event in conversation.events if event.kind == "told")
    sampled = sum(event.seconds for event in conversation.events) - conversation.spent
    environment = tuple(event.seconds for event in conversation.events if event.kind != "called")
    failures, row = failures_of(conversation.failures), conversation.trajectory or Trajectory(task.prompt)
    kept = Kept(
        score=PlayedScore(
            rewards=rewards,
            failure=None if conversation.ended else failures[-1],
            rewritten=conversation.rewritten,
        ),
        course=course_of(row, conversation.failures, environment_s=environment, sampling_s=sampled),
    )
    return Played(row, kept)


def course_of(row: Trajectory, failures: Sequence[TurnEvent], **more: Any) -> Course:
    """The course of a conversation with its row and the events of its failures."""
    blocks, lost = {"eligible_blocks": row.eligible, "cached_blocks": row.hits}, sum(one.seconds for one in failures)
    return Course(failures=failures_of(failures), failed_s=lost, **blocks, **more)


def since(clock: float) -> float:
    """Seconds since a time of the monotonic clock."""
    return round(time.monotonic() - clock, 6)


def called_with(answer: Answer, **more: Any) -> TurnEvent:
    """The event of an answer that is about to be used; `more` are further fields, as the `seconds` of the engines."""
    record = IncrementRecord.of([Grown(0, 0, answer.tokens, answer.logprobs)], answer.weight_version)
    ended = {"finish_reason": answer.finish_reason, "cached": answer.cached}
    return TurnEvent(row=0, kind="called", answer=record, **ended, **more)


def failed_with(failure: EnvironmentFailed, **more: Any) -> TurnEvent:
    """The event of a failure; `more` are further fields."""
    return TurnEvent(row=0, kind="failed", reason=failure.reason, detail=failure.detail, **more)


def answer_of(event: TurnEvent) -> Answer:
    """The answer of an event that `called_with` made."""
    assert event.answer is not None
    (grown,) = event.answer.grown()
    return Answer(grown.tokens, grown.logprobs, event.finish_reason, event.answer.weight_version, event.cached)


def failures_of(events: Sequence[TurnEvent]) -> tuple[Failure, ...]:
    return tuple(Failure.model_validate({"reason": one.reason, "detail": one.detail}) for one in events)


def _event(kind: Literal["begun", "told"], values: Mapping[str, Any]) -> TurnEvent:
    """The event of what an environment has answered."""
    known = {name: value for name, value in values.items() if name in TurnEvent.model_fields}
    return TurnEvent(row=0, kind=kind, **known)


def _messages(observation: str | Sequence[Message] | None) -> list[Message] | None:
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else observation  # pyright: ignore[reportReturnType] - of JSON


def _role(messages: Sequence[Message]) -> str:
    """The writer, in the words of `storage.schema.TURN`: never the policy, whatever an environment calls itself."""
    roles = {str(one["role"]) for one in messages}
    return roles.pop() if len(roles) == 1 and roles <= {"tool", "user"} else "environment"


def _results(messages: Sequence[Message]) -> str | None:
    found = [one["content"] for one in messages if one["role"] == "tool"]
    return json.dumps(found) if found else None
