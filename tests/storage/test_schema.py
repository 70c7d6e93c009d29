"""Schemas: equality, and the permitted changes."""

import pyarrow as pa
import pytest

from storage.errors import SchemaMismatch
from storage.parts import open_table
from storage.schema import (
    EVALUATION,
    EVALUATION_SAMPLES,
    PROMPTS,
    REWARD,
    ROLLOUT,
    SELECTION,
    check,
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


def test_a_table_of_another_version_is_refused_with_the_numbers():
    newer = rollout_table().append_column(NEXT.field("tool_calls"), pa.nulls(12, pa.int32()))
    data = ipc(newer.replace_schema_metadata(NEXT.metadata))
    with pytest.raises(SchemaMismatch, match=r"version 2 of table 'rollout'.* this Ratchet reads version 1"):
        open_table(data, ROLLOUT, "part.arrow", ROLLOUT.names)


ALL = {
    schema.metadata[b"table"].decode(): schema
    for schema in (PROMPTS, ROLLOUT, REWARD, EVALUATION, SELECTION, EVALUATION_SAMPLES)
}
# a change here is a new version of the table: raise SCHEMA_VERSION
WRITTEN = {
    "prompts": "a02884e4905d974f800a159b062d05c6",
    "rollout": "4d640a9d7c32b8707153298c5c168bfb",
    "reward": "0bcce8c91d7dc037cc40724e846c57cf",
    "evaluation": "98933e65129efaba25dbcc64a5b0d961",
    "selection": "b2fa077c14ef6fd148c1d0c7f6edccfb",
    "evaluation_samples": "85b2df9e3ce4ed6e1399f2b42d4be0c8",
}


def test_schemas_do_not_change_by_accident():
    assert {name: fingerprint(schema) for name, schema in ALL.items()} == WRITTEN
