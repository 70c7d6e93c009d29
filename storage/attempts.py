"""Attempts at a stage: who began to work on it, and how often that failed."""

from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel

from storage import layout, records
from storage.backends.root import Root


class Attempt(BaseModel, frozen=True, extra="forbid"):
    """Record that a process began to work on a stage. For people: nothing is decided by it, so it is not flushed."""

    format_version: Literal[1] = 1
    """Version of this record's own format."""
    writer: str
    """Host and process."""
    time: datetime
    """Time of its beginning (UTC)."""


def begin(root: Root, run: str, iteration: int, stage: str, writer: str, revision: int = 0) -> int:
    """Record that `writer` begins to work on a stage; returns how many attempts at it came before."""
    attempt, number = Attempt(writer=writer, time=datetime.now(UTC)), 0
    while True:
        key = layout.attempt_key(run, iteration, stage, revision, number)
        # compared as bytes: the answer to our own write may have been lost, and a damaged record does no harm
        if records.publish(root, key, attempt, durable=False) or records.is_there(root, key, attempt):
            return number
        number += 1
