"""Digests of bytes (xxh3-128: parts) and of values (blake2b: identities)."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash


def bytes_digest(data: bytes | memoryview | pa.Buffer) -> str:
    """xxh3-128 of `data`, 32 hexadecimal characters."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(path: str | Path) -> tuple[str, int]:
    """xxh3-128 of a local file, and its size in bytes."""
    with Path(path).open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest(), file.tell()


def value_digest(value: Any) -> str:
    """blake2b-128 of the canonical JSON of `value` (plain JSON types): the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
