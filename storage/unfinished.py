"""Pieces: parts that are durable before the whole stage is, so that a crash costs only the piece in progress."""

from typing import Literal

from pydantic import BaseModel

from storage import layout, records
from storage.backends.root import Root
from storage.errors import NotCommitted, WrongRecord
from storage.manifest import Part
from storage.parts import PartWriter


class PieceRecord(BaseModel, frozen=True, extra="forbid"):
    """Record that a part of a stage in progress is done."""

    format_version: Literal[1] = 1
    """Version of this record's own format."""
    part: Part
    """The part that is done."""


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
