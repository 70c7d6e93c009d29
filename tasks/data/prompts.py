"""Prompt datasets: reading records, making the stored prompt table, and drawing from it by a cursor."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet

from storage.errors import InputError
from storage.schema import PROMPTS
from tasks.config.data import DataSection
from tasks.config.environment import resolve, without_secrets
from tasks.data.tokenizer import TextCodec

Record = Mapping[str, Any]


def read_records(url: str) -> list[Record]:
    """Records of a JSONL or Parquet file on any fsspec filesystem; `url` may be a reference to it, `env:NAME`.

    Raises:
        InputError: it is missing, empty, or a line is malformed (the message gives the line number).
    """
    try:
        with fsspec.open(address := str(resolve(url, "the URL of a dataset")), "rb") as file:
            data: bytes = file.read()  # pyright: ignore[reportAttributeAccessIssue]
    except FileNotFoundError:
        raise InputError(f"dataset {url} does not exist: give the URL of a JSONL or Parquet file") from None
    except (OSError, ImportError, ValueError) as error:
        raise InputError(f"dataset {url} cannot be read: {without_secrets(str(error))}") from None
    records = _parquet(url, data) if _is_parquet(address) else _jsonl(url, data)
    if not records:
        raise InputError(f"dataset {url} is empty: give at least one record")
    return records


def prompt_table(records: Sequence[Record], section: DataSection, codec: TextCodec, where: str) -> pa.Table:
    """The stored table of prompts, tokenized once.

    Raises:
        InputError: a record has no prompt field, or two records have the same id.
    """
    prompts = [_field(record, section.prompt_field, number, where) for number, record in enumerate(records, 1)]
    ids = [str(record.get(section.id_field, number)) for number, record in enumerate(records, 1)]
    _refuse_duplicates(ids, where)
    answers = [_text(record.get(section.answer_field)) for record in records]
    stop = codec.stop_tokens[0]
    columns = [
        pa.array(ids, pa.string()),
        pa.array(prompts, pa.string()),
        pa.array(codec.encode_batch(prompts), pa.list_(pa.int32())),
        pa.array(answers, pa.string()),
        pa.array([None if a is None else [*codec.encode(a), stop] for a in answers], pa.list_(pa.int32())),
        pa.array([json.dumps(record, default=str) for record in records], pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=PROMPTS)


def check_lengths(table: pa.Table, context: int, max_tokens: int, where: str) -> None:
    """Refuse prompts that leave no room for a response.

    Raises:
        InputError: naming the first prompt that is too long.
    """
    lengths = table["prompt_tokens"].combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
    for bad, reason in ((lengths + max_tokens > context, "too long"), (lengths == 0, "empty")):
        if bad.any():
            row = int(bad.argmax())
            raise InputError(
                f"{where}: prompt {table['prompt_id'][row].as_py()!r} is {reason}: {lengths[row]} tokens, and with "
                f"rollout.max_tokens = {max_tokens} it must fit into a context of {context}. Shorten it, lower "
                "rollout.max_tokens or raise engine.max_model_len"
            )


def draw(rows: int, cursor: int, count: int, seed: int, shuffle: bool) -> np.ndarray:
    """Row numbers of the next `count` prompts of an endless stream over a table of `rows` rows.

    Each pass has its own order, derived from `seed` and the number of the pass, so the cursor alone is the state.

    Args:
        cursor: how many prompts were drawn before.

    Returns:
        (count,) int64.
    """
    positions = np.arange(cursor, cursor + count)
    orders = {
        int(turn): np.random.default_rng([seed, int(turn)]).permutation(rows) if shuffle else np.arange(rows)
        for turn in np.unique(positions // rows)
    }
    return np.array([orders[int(position // rows)][position % rows] for position in positions], dtype=np.int64)


def repetitions(rows: np.ndarray) -> np.ndarray:
    """How often each entry of `rows` occurs before it: where two passes meet, a draw may contain a prompt twice.

    Returns:
        (count,) int64.
    """
    order = np.argsort(rows, kind="stable")
    places, found = np.arange(len(rows)), np.empty(len(rows), dtype=np.int64)
    starts = np.r_[True, rows[order][1:] != rows[order][:-1]] if len(rows) else np.empty(0, dtype=bool)
    found[order] = places - np.maximum.accumulate(np.where(starts, places, 0))
    return found


def _is_parquet(address: str) -> bool:
    return address.partition("?")[0].endswith(".parquet")  # a signed URL continues after the name


def _jsonl(url: str, data: bytes) -> list[Record]:
    records: list[Record] = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(
                f"dataset {url}, line {number}: not valid JSON ({error}). Fix or remove the line"
            ) from None
        if not isinstance(record, dict):
            raise InputError(f"dataset {url}, line {number}: a {type(record).__name__} where an object is expected")
        records.append(record)
    return records


def _parquet(url: str, data: bytes) -> list[Record]:
    try:
        return pyarrow.parquet.read_table(pa.BufferReader(data)).to_pylist()
    except pa.ArrowInvalid as error:
        raise InputError(f"dataset {url} is not a Parquet file: {error}") from None


def _field(record: Record, field: str, number: int, where: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value:
        raise InputError(
            f"{where}, record {number}: field {field!r} is {value!r}, but a text is expected. "
            "Name the right field with data.prompt_field or fix the record"
        )
    return value


def _refuse_duplicates(ids: Sequence[str], where: str) -> None:
    seen: set[str] = set()
    for number, name in enumerate(ids, 1):
        if name in seen:
            raise InputError(f"{where}, record {number}: id {name!r} occurs twice. Make ids unique")
        seen.add(name)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
