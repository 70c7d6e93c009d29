"""Stages in progress: attempts at them, and pieces, which are durable before the whole stage is.

So a crash costs only the piece in progress.
"""

from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel

from storage import layout, records
from storage.backends.root import Root
from storage.errors import NotCommitted, WrongRecord
from storage.manifest import Part
from storage.parts import PartWriter


class PieceRecord(BaseModel, frozen=True, extra="forbid"):
    """Record that a part of a stage in progress is done."""

    format_version: Literal[1] = 1  # version of this record's own format
    part: Part  # the part that is done


def find_piece(writer: PartWriter, name: str) -> Part | None:
    """The part that was kept as piece `name` of the writer's stage, or None."""
    try:
        return read_piece(writer.root, _key(writer, name))
    except NotCommitted:
        return None


def keep_piece(writer: PartWriter, name: str, part: Part) -> Part:
    """Record `part` as piece `name`; returns the part of the first writer."""
    key = _key(writer, name)
    return part if records.publish(writer.root, key, PieceRecord(part=part)) else read_piece(writer.root, key)


def read_piece(root: Root, key: str) -> Part:
    """The part that the record at `key` names; raises as `records.read`."""
    part = records.read(root, key, PieceRecord).part
    if not part.key.startswith(f"{layout.parts_of_piece(key)}/"):
        raise WrongRecord(f"{root.url}/{key} names {part.key}, which another stage made. Remove the record")
    return part


def _key(writer: PartWriter, name: str) -> str:
    return layout.piece_key(writer.run, writer.iteration, writer.stage, writer.revision, name)


class Attempt(BaseModel, frozen=True, extra="forbid"):
    """Record that a process began to work on a stage. For people: nothing is decided by it, so it is not flushed."""

    format_version: Literal[1] = 1  # version of this record's own format
    writer: str  # host and process
    time: datetime  # time of its beginning (UTC)


def begin(root: Root, run: str, iteration: int, stage: str, writer: str, revision: int = 0) -> int:
    """Record that `writer` begins to work on a stage; returns how many attempts at it came before."""
    attempt, number = Attempt(writer=writer, time=datetime.now(UTC)), 0
    while True:
        key = layout.attempt_key(run, iteration, stage, revision, number)
        # compared as bytes: the answer to our own write may have been lost, and a damaged record does no harm
        if records.publish(root, key, attempt, durable=False) or records.is_there(root, key, attempt):
            return number
        number += 1
