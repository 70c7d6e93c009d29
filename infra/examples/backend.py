"""A store of your own: all objects of a root as rows of one SQLite file.

    ratchet run my.toml --root infra/examples/backend.py:SQLite:///folder/runs.db

An object may have 1 GB at most, and the file must be on a local disk.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Any

from ratchet import Backend, Stored

_TABLE = "create table if not exists objects (key text primary key, data blob, bytes integer, modified real)"


class SQLite(Backend):
    """Each write is one transaction, which is flushed when it ends."""

    failures = (sqlite3.Error,)

    def __init__(self, url: str) -> None:
        self.file = Path(url.partition("://")[2])
        if not self.file.parent.is_dir() or not self.file.is_absolute():
            raise ValueError(f"{self.file} is not an absolute path of a file in a folder that exists")

    def put_if_absent(self, key: str, data: memoryview, durable: bool) -> bool:
        return self._do("insert or ignore into objects values (?, ?, ?, ?)", key, data, len(data), time())[0] == 1

    def replace(self, key: str, data: memoryview) -> None:
        self._do("insert or replace into objects values (?, ?, ?, ?)", key, data, len(data), time())

    def read(self, key: str) -> bytes:
        for (data,) in self._do("select data from objects where key = ?", key)[1]:
            return data
        raise FileNotFoundError(key)

    def remove(self, key: str) -> None:
        self._do("delete from objects where key = ?", key)

    def info(self, key: str) -> Stored | None:
        return next(self._listed("where key = ?", key), None)

    def stored(self, prefix: str) -> Iterator[Stored]:
        start = f"{prefix}/" if prefix else ""
        return self._listed("where substr(key, 1, ?) = ?", len(start), start)

    def _listed(self, where: str, *values: Any) -> Iterator[Stored]:
        for key, size, seconds in self._do(f"select key, bytes, modified from objects {where}", *values)[1]:
            yield Stored(key, size, datetime.fromtimestamp(seconds, UTC))

    def _do(self, statement: str, *values: Any) -> tuple[int, list[Any]]:
        with closing(sqlite3.connect(self.file, timeout=30)) as file, file:
            file.execute(_TABLE)
            done = file.execute(statement, values)
            return done.rowcount, done.fetchall()
