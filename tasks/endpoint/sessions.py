"""Sessions: the conversations of one trajectory, as a client tells them and as tokens.

A client sends its whole history as text each time. The part of it that is the policy's keeps the ids that were sampled,
and only what is new is rendered. Where the client has changed the history, or the template does, a branch begins."""

import asyncio
import hashlib
import itertools
import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from storage.errors import RatchetError
from tasks.data.chat import ASSISTANT
from tasks.endpoint.requests import Call, Message, Refused
from tasks.environments.calls import Parts, recorded
from tasks.environments.rendering import Renderer
from tasks.environments.sampler import Sampler
from tasks.environments.trajectory import Answer, Trajectory

Why = Literal["first", "again", "edited", "tools", "template"]
"""Reason for which a branch began: it is the first; another answer to the same history was asked; the history is not
one that was sampled; other tools are shown; the template does not keep what was sampled."""
_LIMITS = ("session_limit", "context_length_exceeded")
_SHOWN = 20  # refusals that are kept in full
_LONGEST = 200  # characters of a value that is recorded


def stranger() -> Refused:
    """The refusal of a request that is of no session."""
    told = "the API key is of no session, or of one that has ended: give the one of this trajectory"
    return Refused(told, "invalid_api_key", 401)


class History(NamedTuple):
    """The history that a request sends: messages, or one text whose role is empty."""

    messages: tuple[Message, ...]
    tools: str = "[]"  # JSON

    @property
    def shown_tools(self) -> list[Any]:
        """The tools as templates take them."""
        return json.loads(self.tools)

    def rendered(self) -> list[dict[str, Any]]:
        """The messages as templates take them."""
        return [one.rendered() for one in self.messages]

    def after(self, end: "History") -> tuple[Message, ...]:
        """New messages after another history; none if it does not go on with that."""
        if self.tools != end.tools or self.messages[0].role != end.messages[0].role:
            return ()
        if not self.messages[0].role:
            text, before = self.messages[0].content, end.messages[0].content
            return (Message("", text.removeprefix(before)),) if text.startswith(before) else ()
        same = all(sent.repeats(ours) for sent, ours in zip(self.messages, end.messages, strict=False))
        return self.messages[len(end.messages) :] if same else ()

    def then(self, answer: Message, sampled: str) -> "History":
        """The history with an answer. In a text it is all that was sampled, as nothing else tells where it ends: a
        client that was not given its stop text, and leaves it out, does not go on with it."""
        if self.messages[0].role:
            return History((*self.messages, answer), self.tools)
        return History((Message("", self.messages[0].content + sampled),))


@dataclass(frozen=True)
class _End:
    """The end of an answer, from which a conversation may go on."""

    history: History  # with the answer, as the client was given it
    texts: tuple[dict[str, Any], ...]  # the same, with each answer of this branch as the text that was sampled
    turns: int
    opened: str | None  # as in `Renderer.after`


@dataclass(eq=False)
class Branch:
    """One row of tokens, each turn of which was sampled after exactly those before it."""

    number: int
    why: Why
    seed: int
    row: Trajectory
    began: History
    birth: int  # number among the branches that began after the same tokens
    parent: int | None = None  # branch from which its first turns are; they are trained there alone
    ends: list[_End] = field(default_factory=list)
    taken: bool = False  # True if an answer is being sampled at its end

    def last(self, turns: int) -> int:
        """The last token of the first turns."""
        return int(self.row.tokens[len(self.row.prompt) + self.row.turns[turns - 1]["end"] - 1])

    def copied(self, turns: int) -> Trajectory:
        """The first turns, none of which counts as sampled: what was is trained in this branch."""
        copy, tokens = Trajectory(self.row.prompt), self.row.tokens[len(self.row.prompt) :]
        for turn in self.row.turns[:turns]:
            copy.observe(tokens[turn["begin"] : turn["end"]], turn["role"])
        return copy


class Asked(NamedTuple):
    """A question for an engine."""

    branch: Branch
    history: History
    before: tuple[dict[str, Any], ...]  # messages that `new` follows, as texts; empty at the beginning of a branch
    new: NDArray[np.int32]  # tokens to be appended to the branch before the answer
    tokens: NDArray[np.int32]  # all that precedes the answer
    opened: str | None = None  # the same as text, if it has been rendered


@dataclass(eq=False)
class Pending:
    """A request, which a task answers."""

    task: asyncio.Task[Any]
    clients: int = 0  # that wait for its answers, or have been given them
    given: list[Any] | None = None  # the answers, once a client was there to be given them


def _bounded(value: JsonValue) -> JsonValue:
    """A value as it is recorded: a long one by the beginning of its JSON text."""
    text = json.dumps(value)
    return value if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


@dataclass
class Session:
    """Conversations of one API key. Its methods are called from one thread."""

    key: str
    seed: int
    renderer: Renderer
    turns: int  # most answers
    tokens: int  # most sampled tokens, of all branches
    sampler: Sampler
    branches: list[Branch] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Of requests, answers, refusals by code, and parameters that were overridden."""
    under_way: defaultdict[str, list[Pending]] = field(default_factory=lambda: defaultdict(list))
    """Requests by their digest."""
    last: Branch | None = None  # branch of the newest answer
    ended: bool = False  # True if it accepts no more
    at_limit: bool = False  # True if the newest response was that the policy is at a limit
    failure: RatchetError | None = None  # by which the engines could not answer
    overridden: dict[str, JsonValue] = field(default_factory=dict)  # by parameter, the value that was asked for last
    _births: defaultdict[bytes, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Numbers of the branches that began after the same tokens."""
    _first: tuple[History, NDArray[np.int32]] | None = None  # as rendered last: `n` answers are asked of one history
    _kept: int = 0  # tokens that answers which are being sampled may have
    _settled: asyncio.Event = field(default_factory=asyncio.Event)  # pulses when one of these has ended
    _open: int = 0  # questions that are under way
    _asked_s: float = 0.0  # time of the steady clock at which the first of them was asked
    _sampled_s: float = 0.0

    def note(self, refusal: Refused) -> None:
        """Count a refusal; the first ones are kept."""
        self.counts[f"refused/{refusal.code}"] += 1
        self.at_limit = refusal.code in _LIMITS
        if len(self.refused) < _SHOWN:
            self.refused.append(str(refusal))

    def override(self, asked: Mapping[str, JsonValue]) -> None:
        """Record parameters that have no effect."""
        self.overridden |= {name: _bounded(value) for name, value in asked.items()}
        self.counts.update(f"overridden/{name}" for name in asked)

    async def reserve(self, wanted: int) -> int:
        """Tokens that an answer may have, until `count` is told of it. It waits for answers that are being sampled
        where these may take some of what is wanted. Raises Refused: the session has had all of its tokens."""
        while self._kept and self._left < wanted:
            await self._settled.wait()
        if (given := min(wanted, self._left)) < 1:
            raise self._at("tokens", self.tokens)
        self._kept += given
        return given

    @property
    def _left(self) -> int:
        return self.tokens - self.counts["tokens"] - self._kept

    def _at(self, name: str, most: int) -> Refused:
        return Refused(f"the session has its {most} {name}: it accepts no more", "session_limit")

    def ask(self, history: History) -> Asked:
        """Find the branch that a history goes on with, or begin one. Raises Refused: the session is at its limits;
        InputError: the template refuses the messages."""
        if self.ended:
            raise stranger()
        if self.counts["answers"] + self._open >= self.turns:
            raise self._at("answers", self.turns)
        asked = self._continued(history) or self._begun(history)
        self._asked_s = self._asked_s if self._open else time.monotonic()
        self._open += 1
        return asked

    def count(self, answer: Answer | None, kept: int = 0) -> None:
        """Count the answer to a question, for which so many tokens were kept, or the question as one that has none."""
        self._open, self._kept = self._open - 1, self._kept - kept
        self._settled.set()
        self._settled.clear()
        self._sampled_s += 0 if self._open else time.monotonic() - self._asked_s
        if answer is not None:
            self.counts.update(answers=1, tokens=len(answer.tokens))

    def answered(self, asked: Asked, answer: Answer, text: str, parts: Parts) -> Message:
        """Append an answer, whose text was `text`; the message that the client is given."""
        row, calls = asked.branch.row, tuple(self._call(asked, *one) for one in enumerate(parts.calls))
        if len(asked.new):
            row.observe(asked.new, _role(asked.history), **_results(asked.history))
        row.answer(answer, **({"calls": json.dumps(recorded(parts))} if parts.calls else {}))
        message = Message(ASSISTANT, parts.content, calls, reasoning=parts.reasoning)
        texts = (*(asked.before or asked.history.rendered()), {"role": ASSISTANT, "content": text})
        asked.branch.ends.append(_End(asked.history.then(message, text), texts, len(row.turns), asked.opened))
        self.last, self.at_limit, asked.branch.taken = asked.branch, False, False
        return message

    def unanswered(self, asked: Asked) -> None:
        """Forget a question whose answer nobody is given: asked again, it is the same one."""
        if not asked.branch.ends:
            self._births[asked.tokens.tobytes()].discard(asked.branch.birth)
        asked.branch.taken = False

    @property
    def sampling_s(self) -> float:
        """Seconds in which answers were sampled."""
        return self._sampled_s + (time.monotonic() - self._asked_s if self._open else 0)

    @property
    def sampled(self) -> list[Branch]:
        """The branches that have an answer of their own, in the order of their beginning."""
        return [one for one in self.branches if one.ends]

    @property
    def others(self) -> list[Branch]:
        """Those of them beside the branch of the last answer."""
        return [one for one in self.sampled if one is not self.last]

    def _continued(self, history: History) -> Asked | None:
        """The branch whose answer has most of the history before it; None if there is none, or it cannot be kept."""
        ends = [(branch, end) for branch in self.branches for end in branch.ends]
        ends.sort(key=lambda one: len(one[1].texts), reverse=True)
        found = next((one for one in ends if history.after(one[1].history)), None)
        if found is None:
            return None
        branch, end = found
        new = [one.rendered() for one in history.after(end.history)]
        more = self.renderer.after(end.texts, new, history.shown_tools, branch.last(end.turns), end.opened)
        if not more.kept:
            return self._begun(history, "template")
        texts, given = (*end.texts, *new), np.asarray(more.tokens, np.int32)
        if end is branch.ends[-1] and not branch.taken:
            branch.taken = True
            return Asked(branch, history, texts, given, np.concatenate([branch.row.tokens, given]), more.text)
        row = branch.copied(end.turns)
        tokens = np.concatenate([row.tokens, given])
        born = self._born(history, "again", row, tokens, branch.number)
        return Asked(born, history, texts, given, tokens, more.text)

    def _why(self, history: History) -> Why:
        if not self.branches:
            return "first"
        if any(one.began == history for one in self.branches):
            return "again"
        ends = [end.history._replace(tools=history.tools) for one in self.branches for end in one.ends]
        return "tools" if any(map(history.after, ends)) else "edited"

    def _begun(self, history: History, why: Why | None = None) -> Asked:
        if self._first is None or self._first[0] is not history:
            self._first = history, np.asarray(self.renderer.first(history.rendered(), history.shown_tools), np.int32)
        tokens = self._first[1]
        branch = self._born(history, why or self._why(history), Trajectory(tokens), tokens, None)
        return Asked(branch, history, (), np.empty(0, np.int32), tokens)

    def _born(
        self, history: History, why: Why, row: Trajectory, tokens: NDArray[np.int32], parent: int | None
    ) -> Branch:
        """A branch. Its seed follows from that of the session, from the tokens before its first answer, and from its
        number among the branches that began there: not from the order of requests for different answers."""
        place = tokens.tobytes()
        birth = next(number for number in itertools.count() if number not in self._births[place])
        born = hashlib.blake2b(f"{self.seed}/{birth}/".encode() + place, digest_size=8).digest()
        self._births[place].add(birth)
        branch = Branch(len(self.branches), why, int.from_bytes(born) >> 2, row, history, birth, parent, taken=True)
        self.branches.append(branch)
        return branch

    def _call(self, asked: Asked, number: int, call: tuple[str, str]) -> Call:
        return Call(f"call_{asked.branch.number}_{len(asked.branch.row.turns)}_{number}", *call)


def _role(history: History) -> str:
    """Role of what is new: of the last message, in the words of `storage.schema.TURN`."""
    role = history.messages[-1].role
    return role if role in ("tool", "user") else "environment"


def _results(history: History) -> dict[str, str]:
    found: list[dict[str, Any]] = []
    for one in reversed(history.messages):
        if one.role != "tool":
            break
        found.insert(0, {"id": one.call_id, "content": one.content})
    return {"results": json.dumps(found)} if found else {}
