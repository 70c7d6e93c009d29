"""Write lock of SQLite in our Prefect servers: a transaction takes it when it begins."""

from typing import Any

from fastapi import FastAPI
from sqlalchemy import Engine, event

_LATE, _EARLY = "BEGIN DEFERRED", "BEGIN IMMEDIATE"


def site_app() -> FastAPI:
    """The application of a site's server, for uvicorn."""
    from prefect.server.api.server import create_app  # a second of processor, which nothing else here needs

    write_lock_first()
    return create_app()


def write_lock_first() -> None:
    """Let each transaction of this process wait for SQLite's write lock at its first statement.

    Prefect begins most transactions without it, reads, and then writes. If another connection has written in between,
    SQLite refuses at once ("database is locked"), whatever the timeout: what was read is out of date, so waiting could
    not help (https://www.sqlite.org/isolation.html). A transaction that begins with the lock waits for it."""
    if not event.contains(Engine, "before_cursor_execute", _begin_with_lock):
        event.listen(Engine, "before_cursor_execute", _begin_with_lock, retval=True)


def _begin_with_lock(
    _connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _executemany: bool
) -> tuple[str, Any]:
    return (_EARLY if statement == _LATE else statement), parameters
