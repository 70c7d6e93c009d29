"""Schemas: what counts as the same, and how they may change."""

import itertools

import pyarrow as pa
import pytest

from storage.errors import SchemaMismatch
from storage.parts import open_table
from storage.schema import (
    EARLIER,
    EVALUATION,
    PROMPTS,
    REWARD,
    ROLLOUT,
    SELECTION,
    TABLES,
    check,
    check_succession,
    fingerprint,
)
from tests.storage.tables import rollout_table


def with_version(schema, version):
    return schema.with_metadata({**schema.metadata, b"version": str(version).encode()})


def field(name, nullable=True, kind=None):
    return pa.field(name, kind or pa.int32(), nullable=nullable, metadata={"meaning": name, "unit": ""})


NEXT = with_version(ROLLOUT.append(field("tool_calls")), 2)


def ipc(table):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def renamed(schema):
    return schema.set(0, schema.field(0).with_name("other"))


CHANGES = {
    "name": renamed(ROLLOUT),
    "type": ROLLOUT.set(1, field("iteration", nullable=False, kind=pa.int64())),
    "nullability": ROLLOUT.set(1, ROLLOUT.field(1).with_nullable(True)),
    "unit": ROLLOUT.set(6, ROLLOUT.field(6).with_metadata({"meaning": "", "unit": "bit"})),
    "order": pa.schema(list(ROLLOUT)[::-1], metadata=ROLLOUT.metadata),
    "one column more": ROLLOUT.append(field("more")),
    "version": with_version(ROLLOUT, 9),
    "no metadata": ROLLOUT.remove_metadata(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(change):
    assert fingerprint(change) != fingerprint(ROLLOUT)
    with pytest.raises(SchemaMismatch, match=r"part\.arrow"):
        check(change, ROLLOUT, "part.arrow")


@pytest.mark.parametrize("schema", [PROMPTS, ROLLOUT, REWARD, EVALUATION, SELECTION])
def test_every_column_says_what_it_means(schema):
    assert all(one.metadata[b"meaning"] for one in schema)
    assert TABLES[schema.metadata[b"table"].decode()] is schema


def test_a_table_of_the_version_before_reads_with_nulls():
    table = rollout_table()
    data = ipc(table)
    read = open_table(data, NEXT, "part.arrow", NEXT.names, earlier=[ROLLOUT])
    assert read.schema.equals(NEXT, check_metadata=True)
    assert read["tool_calls"].null_count == table.num_rows
    assert read.select(ROLLOUT.names).equals(table)
    assert open_table(data, NEXT, "part.arrow", ["tool_calls"], earlier=[ROLLOUT]).num_rows == table.num_rows


def test_an_older_looking_table_that_no_version_wrote_is_refused():
    with pytest.raises(SchemaMismatch, match=r"part\.arrow"):
        open_table(ipc(rollout_table()), NEXT, "part.arrow", NEXT.names, earlier=[])


def test_a_newer_table_is_refused_with_the_numbers():
    newer = rollout_table().append_column(NEXT.field("tool_calls"), pa.nulls(12, pa.int32()))
    data = ipc(newer.replace_schema_metadata(NEXT.metadata))
    with pytest.raises(SchemaMismatch, match=r"version 2 of table 'rollout'.* reads up to 1"):
        open_table(data, ROLLOUT, "part.arrow", ROLLOUT.names)


def test_a_new_version_may_add_nullable_columns():
    check_succession(ROLLOUT, NEXT)


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (ROLLOUT.append(field("more")), "raise the version"),
        (with_version(ROLLOUT.append(field("more", nullable=False)), 2), "must be nullable"),
        (with_version(ROLLOUT.remove(12), 2), "drops"),
        (with_version(renamed(ROLLOUT), 2), "never changes"),
        (with_version(REWARD, 2), "keep the name"),
    ],
    ids=["same version", "not nullable", "dropped", "renamed", "other table"],
)
def test_a_new_version_may_do_nothing_else(new, reason):
    with pytest.raises(SchemaMismatch, match=reason):
        check_succession(ROLLOUT, new)


def test_the_registered_versions_keep_the_rule():
    for name, schema in TABLES.items():
        versions = [*EARLIER.get(name, ()), schema]
        for old, new in itertools.pairwise(versions):
            check_succession(old, new)


# a change here is a new version of the table: keep the old schema in EARLIER and raise the version
WRITTEN = {
    "prompts": "a02884e4905d974f800a159b062d05c6",
    "rollout": "5209f473a1fd83035934f1f0deb9fe62",
    "reward": "5b2e5eb2a71c783dec489911ce122932",
    "evaluation": "7242269e7fc2293791f8cc67366f39c9",
    "selection": "747d30edda725a3a110a0bd93809ace9",
    "evaluation_samples": "21181458d7c0ab5eb3b4f248085f38bb",
}


BEFORE = {"reward": ["f5fb3953929001bffc8ac472f3d0ceee"], "evaluation": ["fe0fa69aa9dc519ca9d8217445f9d1e5"]}


def test_schemas_do_not_change_by_accident():
    assert {name: fingerprint(schema) for name, schema in TABLES.items()} == WRITTEN
    assert {name: [fingerprint(schema) for schema in schemas] for name, schemas in EARLIER.items()} == BEFORE
