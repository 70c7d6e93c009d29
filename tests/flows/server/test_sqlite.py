"""Transactions of Prefect's server on SQLite wait for each other."""

import asyncio
from pathlib import Path

import pytest
import sqlalchemy
import sqlalchemy.exc
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy import Engine, event

from flows.server.sqlite import _begin_with_lock, write_lock_first


@pytest.fixture
def lock_first():
    write_lock_first()
    write_lock_first()  # a second request has the same effect
    yield
    event.remove(Engine, "before_cursor_execute", _begin_with_lock)


async def add_one(database: AioSqliteConfiguration) -> None:
    """Read a number and write it back, larger by one, as most transactions of the server do."""
    engine = await database.engine()
    async with await database.session(engine) as session, database.begin_transaction(session):
        (before,) = (await session.execute(sqlalchemy.text("SELECT number FROM counter"))).one()
        await asyncio.sleep(0.05)
        await session.execute(sqlalchemy.text(f"UPDATE counter SET number = {before + 1}"))


async def count(file: Path, tasks: int) -> int:
    database = AioSqliteConfiguration(f"sqlite+aiosqlite:///{file}", timeout=60)
    engine = await database.engine()
    async with engine.begin() as connection:
        await connection.execute(sqlalchemy.text("CREATE TABLE counter (number INTEGER)"))
        await connection.execute(sqlalchemy.text("INSERT INTO counter VALUES (0)"))
    await asyncio.gather(*(add_one(database) for _ in range(tasks)))
    async with engine.connect() as connection:
        return (await connection.execute(sqlalchemy.text("SELECT number FROM counter"))).scalar_one()


@pytest.mark.usefixtures("lock_first")
def test_transactions_that_read_before_they_write_wait_for_each_other(tmp_path: Path):
    assert asyncio.run(count(tmp_path / "prefect.db", tasks=4)) == 4


def test_without_the_lock_one_of_them_is_refused(tmp_path: Path):
    with pytest.raises(sqlalchemy.exc.OperationalError, match="database is locked"):
        asyncio.run(count(tmp_path / "prefect.db", tasks=4))
