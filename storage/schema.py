"""The Arrow schemas of stored tables. Field metadata says what a field means and its unit."""

import pyarrow as pa

from storage.digest import value_digest
from storage.errors import SchemaMismatch

SCHEMA_VERSION = 1


def _field(name: str, kind: pa.DataType, meaning: str, unit: str = "", nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"meaning": meaning, "unit": unit})


PROMPTS = pa.schema(
    [
        _field("prompt_id", pa.string(), "id of the prompt in its dataset"),
        _field("prompt", pa.string(), "text of the prompt"),
        _field("prompt_tokens", pa.list_(pa.int32()), "token ids of the prompt", "token"),
        _field("answer", pa.string(), "solved answer, if the dataset has one", nullable=True),
        _field("answer_tokens", pa.list_(pa.int32()), "token ids of the answer with the stop token", "token", True),
        _field("record", pa.string(), "the dataset's whole record as JSON, which reward functions are given"),
    ],
    metadata={"table": "prompts", "version": str(SCHEMA_VERSION)},
)

ROLLOUT = pa.schema(
    [
        _field("run", pa.string(), "id of the run"),
        _field("iteration", pa.int32(), "iteration that sampled it"),
        _field("prompt_id", pa.string(), "id of the prompt in its dataset"),
        _field("sample_id", pa.int32(), "number of the sample within its prompt group, from 0"),
        _field("prompt_tokens", pa.list_(pa.int32()), "token ids given to the engine", "token"),
        _field("response_tokens", pa.list_(pa.int32()), "token ids sampled, with the stop token", "token"),
        _field(
            "logprobs", pa.list_(pa.float32()), "engine's log-probability of each sampled token under the "
            "distribution it was sampled from", "nat",
        ),
        _field("finish_reason", pa.string(), "stop, length or abort"),
        _field("weight_version", pa.int32(), "iteration whose weights the engine held"),
        _field("seed", pa.int64(), "seed of this sample"),
        _field("temperature", pa.float32(), "sampling temperature"),
        _field("top_p", pa.float32(), "nucleus mass"),
        _field("max_tokens", pa.int32(), "limit on response tokens", "token"),
    ],
    metadata={"table": "rollout", "version": str(SCHEMA_VERSION)},
)

REWARD = pa.schema(
    [
        _field("prompt_id", pa.string(), "id of the prompt in its dataset"),
        _field("sample_id", pa.int32(), "number of the sample within its prompt group"),
        _field("reward", pa.float32(), "score; null unless status is ok", nullable=True),
        _field("status", pa.string(), "ok, error (the function raised) or timeout (deadline passed)"),
        _field("detail", pa.string(), "what was raised, or empty"),
    ],
    metadata={"table": "reward", "version": str(SCHEMA_VERSION)},
)

EVALUATION = pa.schema(
    [
        _field("prompt_id", pa.string(), "id of the held-out prompt"),
        _field("response_tokens", pa.list_(pa.int32()), "greedy answer, with the stop token", "token"),
        _field("reward", pa.float32(), "score; null unless status is ok", nullable=True),
        _field("status", pa.string(), "ok, error or timeout, as in the reward table"),
    ],
    metadata={"table": "evaluation", "version": str(SCHEMA_VERSION)},
)


def fingerprint(schema: pa.Schema) -> str:
    """Identity of a schema: names, types, nullability, meaning. Arrow casts silently, so readers compare this."""
    fields = [[f.name, str(f.type), f.nullable, _text(f.metadata)] for f in schema]
    return value_digest([fields, _text(schema.metadata)])


def check(schema: pa.Schema, expected: pa.Schema, where: str) -> None:
    """Refuse a table whose schema is not `expected`.

    Raises:
        SchemaMismatch: naming the place and the first field that differs.
    """
    if fingerprint(schema) == fingerprint(expected):
        return
    for mine, theirs in zip(expected, schema, strict=False):
        if not mine.equals(theirs, check_metadata=True):
            raise SchemaMismatch(f"{where}: field {theirs} stands where {mine} is expected")
    raise SchemaMismatch(f"{where}: fields {schema.names} with {_text(schema.metadata)}; expected {expected.names}")


def _text(metadata: dict[bytes, bytes] | None) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in (metadata or {}).items()}
