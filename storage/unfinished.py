"""Stages in progress: attempts at them, pieces, which are durable before the whole stage is, and increments of the
responses of a piece, or turns of its conversations, which are durable before the piece is.

So a crash costs only what was sampled since the last increment, or the turn that was open."""

import base64
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, JsonValue

from storage import layout, records
from storage.backends.root import Root
from storage.errors import DigestMismatch, NotCommitted, SchemaMismatch, WrongRecord
from storage.kill_points import Point, reached
from storage.manifest import Part
from storage.parts import PartWriter


class PieceRecord(BaseModel, frozen=True, extra="forbid"):
    format_version: Literal[1] = 1  # version of this record's own format
    part: Part  # the part that is done
    scores: tuple[dict[str, JsonValue], ...] = Field(default=(), exclude_if=operator.not_)
    """Scores of its rows where environments gave them, and how each was played; no other piece has the key."""


def find_piece(writer: PartWriter, name: str) -> Part | None:
    """The part that was kept as piece `name` of the writer's stage, or None."""
    try:
        return read_piece(writer.root, piece_key(writer, name))
    except NotCommitted:
        return None


def find_scores(writer: PartWriter, name: str) -> tuple[dict[str, JsonValue], ...]:
    return records.read(writer.root, piece_key(writer, name), PieceRecord).scores


def keep_piece(writer: PartWriter, name: str, part: Part, scores: Sequence[dict[str, JsonValue]] = ()) -> Part:
    """Record `part` as piece `name`, with scores of its rows if it has them; returns the part of the first writer."""
    key, record = piece_key(writer, name), PieceRecord(part=part, scores=tuple(scores))
    return part if records.publish(writer.root, key, record) else read_piece(writer.root, key)


class Grown(NamedTuple):
    row: int  # place of the sample in its piece
    first: int  # tokens of the response before these
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]  # of each of them, nat


class IncrementRecord(BaseModel, frozen=True, extra="forbid"):
    """Record of tokens by which responses of a piece in progress have grown, in the order of `rows`."""

    format_version: Literal[1] = 1  # version of this record's own format
    weight_version: int | None  # iteration whose weights sampled them
    rows: tuple[int, ...]  # `Grown.row`
    firsts: tuple[int, ...]  # `Grown.first`
    lengths: tuple[int, ...]  # number of tokens
    tokens: str  # all of them as int32, little endian, in base64
    logprobs: str  # of all of them as float32, little endian, in base64

    @classmethod
    def of(cls, some: Sequence[Grown], weight_version: int | None) -> "IncrementRecord":
        values = [np.concatenate([one[at] for one in some]).astype(kind) for at, kind in ((2, "<i4"), (3, "<f4"))]
        tokens, logprobs = (base64.b64encode(one.tobytes()).decode() for one in values)
        rows, firsts, lengths = zip(*((one.row, one.first, len(one.tokens)) for one in some), strict=True)
        named = {"rows": rows, "firsts": firsts, "lengths": lengths, "tokens": tokens, "logprobs": logprobs}
        return cls(weight_version=weight_version, **named)

    def grown(self) -> Iterator[Grown]:
        tokens = np.frombuffer(base64.b64decode(self.tokens), "<i4").astype(np.int32)
        logprobs = np.frombuffer(base64.b64decode(self.logprobs), "<f4").astype(np.float32)
        ends = np.cumsum(self.lengths).tolist()
        for row, first, length, end in zip(self.rows, self.firsts, self.lengths, ends, strict=True):
            yield Grown(row, first, tokens[end - length : end], logprobs[end - length : end])


class TurnEvent(BaseModel, frozen=True, extra="forbid"):
    """An event of a conversation. A call of an environment is recorded before it is made, and its result after it."""

    row: int  # place of the sample in its piece
    kind: Literal["begun", "called", "told", "failed"]
    messages: tuple[dict[str, JsonValue], ...] | None = None  # of the observation, if there is one
    tools: tuple[dict[str, JsonValue], ...] = ()  # definitions that the policy was given
    answer: IncrementRecord | None = None  # answer of the policy, which the environment is called with
    finish_reason: str = ""  # end of that answer
    cached: tuple[int, int] | None = None  # tokens before it that the prefix cache had, and those of one of its blocks
    calls: str = ""  # calls of tools in that answer, as JSON; empty where nobody reads them
    reward: float | None = None
    done: bool = False
    seconds: float = 0.0  # time that the environment took, or the engines for the answer
    state: str | None = None  # text from which the environment can be loaded, if it gives one
    goes_on: bool = False  # True if it can go on in another process; of a failure, if the turns before it count
    reason: str = ""  # of a failure
    detail: str = ""  # of a failure, in words


class TurnsRecord(BaseModel, frozen=True, extra="forbid"):
    format_version: Literal[1] = 1  # version of this record's own format
    events: tuple[TurnEvent, ...]


def find_increments(root: Root, pieces: Sequence[str]) -> list[list[IncrementRecord]]:
    """Increments that were kept of each of a stage's pieces with these keys, in order. Raises DigestMismatch or
    SchemaMismatch: a record is damaged; WrongRecord: one is missing, or is that of another key."""
    there = listed_increments(root, pieces[0]) if pieces else {}
    return [_numbered(root, piece, there.get(piece, []), IncrementRecord) for piece in pieces]


def find_turns(root: Root, piece: str) -> list[TurnsRecord]:
    """Events of conversations that were kept of the piece with the key `piece`, in order; raises as
    `find_increments`."""
    return _numbered(root, piece, listed_increments(root, piece, turns=True).get(piece, []), TurnsRecord)


def read_increment(root: Root, key: str) -> IncrementRecord | TurnsRecord:
    """The record at the key of an increment; raises as `records.read`."""
    return records.read(root, key, TurnsRecord if layout.is_of_turns(key) else IncrementRecord)


def listed_increments(root: Root, piece: str, turns: bool = False) -> dict[str, list[str]]:
    """Keys of the increments, or of the turns, of all pieces of the stage of this one, by the key of their piece."""
    return _by_piece(root.keys(layout.increments_of(piece, turns)))


def lost_increments(keys: Collection[str]) -> list[str]:
    """Keys that are missing among those of increments, as later ones of their pieces are there."""
    known = set(keys)
    return [
        key
        for piece, there in _by_piece(keys).items()
        for number in range(max(map(layout.increment_number, there)))
        if (key := layout.increment_key(piece, number, layout.is_of_turns(there[0]))) not in known
    ]


def _by_piece(keys: Iterable[str]) -> dict[str, list[str]]:
    found = dict[str, list[str]]()
    for key in keys:
        if (piece := layout.piece_of_increment(key)) is not None:
            found.setdefault(piece, []).append(key)
    return found


def _numbered[M: BaseModel](root: Root, piece: str, there: Sequence[str], kind: type[M]) -> list[M]:
    """Records of a piece; `there` are the keys of those that were listed before."""
    turns, found = kind is TurnsRecord, list[M]()
    repair = f"or remove {root.url}/{layout.increments_of(piece, turns)}: what the stage has begun then begins again"
    try:
        for number in itertools.count():
            found.append(records.read(root, layout.increment_key(piece, number, turns), kind))
    except NotCommitted:
        if later := [key for key in there if layout.increment_number(key) > len(found)]:
            lost = f"{root.url}/{layout.increment_key(piece, len(found), turns)} is missing, and {later[-1]} is there"
            raise WrongRecord(f"{lost}. Restore it from a copy, {repair}") from None
    except (DigestMismatch, SchemaMismatch) as error:
        raise type(error)(f"{error}, {repair}") from None
    return found


def keep_increment(root: Root, piece: str, number: int, record: IncrementRecord | TurnsRecord) -> int:
    """Record increments of the piece with the key `piece` under `number`, or the next one that is free; returns the
    number that follows."""
    key = partial(layout.increment_key, piece, turns=isinstance(record, TurnsRecord))
    number = _publish_numbered(root, key, record, number)
    reached(Point.MID_RESPONSE, key(number))
    return number + 1


def read_piece(root: Root, key: str) -> Part:
    """The part that the record at `key` names; raises as `records.read`."""
    part = records.read(root, key, PieceRecord).part
    iteration, stage = layout.place_of(key) or (0, "")
    if not part.key.startswith(f"{layout.stage_parts(layout.run_of(key), iteration, stage)}/"):
        raise WrongRecord(f"{root.url}/{key} names {part.key}, which another stage made. Remove the record")
    return part


def piece_key(writer: PartWriter, name: str) -> str:
    return layout.piece_key(writer.run, writer.iteration, writer.stage, writer.revision, name)


class Attempt(BaseModel, frozen=True, extra="forbid"):
    """Record that a process began to work on a stage. For people: nothing is decided by it, so it is not flushed."""

    format_version: Literal[1] = 1  # version of this record's own format
    writer: str  # host and process
    time: datetime  # time of its beginning (UTC)


def begin(root: Root, run: str, iteration: int, stage: str, writer: str, revision: int = 0) -> int:
    """Record that `writer` begins to work on a stage; returns how many attempts at it came before."""
    key = partial(layout.attempt_key, run, iteration, stage, revision)
    return _publish_numbered(root, key, Attempt(writer=writer, time=datetime.now(UTC)), durable=False)


def _publish_numbered(
    root: Root, key: Callable[[int], str], record: BaseModel, number: int = 0, durable: bool = True
) -> int:
    """Publish a record at the first key that is free from `number` on; returns its number."""
    # compared as bytes: the answer to our own write may have been lost, and a damaged record does no harm
    while not (records.publish(root, key(number), record, durable) or records.is_there(root, key(number), record)):
        number += 1
    return number
