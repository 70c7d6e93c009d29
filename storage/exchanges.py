"""Exchanges with a service outside the run, such as a judge, by their content: what was asked is never asked again."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, Field

from storage import layout, records
from storage.backends.root import Root
from storage.errors import NotCommitted


class Exchange(BaseModel, frozen=True, extra="forbid"):
    format_version: Literal[1] = 1  # version of this record's own format
    url: str  # the address that was asked
    request: str  # the body that was sent, as JSON; it holds no secret
    response: str  # the body that came back
    seconds: float  # time that the answer took
    attempts: int  # requests that it took, this one included
    time: datetime = Field(default_factory=lambda: datetime.now(UTC))  # time of the answer


@dataclass(frozen=True)
class RunExchanges:
    """The exchanges of a run, by the digest of what was asked. Its methods raise as `records.read`."""

    root: Root
    run: str

    def find(self, digest: str) -> Exchange | None:
        try:
            return records.read(self.root, layout.exchange_key(self.run, digest), Exchange)
        except NotCommitted:
            return None

    def keep(self, digest: str, exchange: Exchange) -> Exchange:
        """Keep an exchange; of two at once, the first one counts, and is returned."""
        key = layout.exchange_key(self.run, digest)
        return exchange if records.publish(self.root, key, exchange) else records.read(self.root, key, Exchange)
