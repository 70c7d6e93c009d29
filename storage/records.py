"""Small JSON records that carry their own key and the digest of their own text.

So a flipped bit is detected as in any part, and so is a record that was copied or renamed."""

import json

from pydantic import BaseModel, ValidationError

from storage.backends.root import Root
from storage.digest import bytes_digest
from storage.errors import DigestMismatch, SchemaMismatch, WrongRecord

_PLACE = b',\n "place": '  # of the record itself: a member of a part of it is indented more
_SEAL = b',\n "checksum": "'
_END = b'"\n}\n'
_SHOWN = 3  # flaws of a record that a message names


def publish(root: Root, key: str, record: BaseModel, durable: bool = True) -> bool:
    """Write a record unless its key is taken; `durable` and the result are those of `Root.put_if_absent`."""
    return root.put_if_absent(key, seal(record, key), durable)


def is_there(root: Root, key: str, record: BaseModel) -> bool:
    """True if this very record is at a taken key: the answer to its write may have been lost."""
    return root.read_bytes(key) == seal(record, key)


def read[M: BaseModel](root: Root, key: str, kind: type[M]) -> M:
    """The record at `key`. Raises NotCommitted if there is none, DigestMismatch if its text is not what was written,
    SchemaMismatch if it is not a record of this kind, WrongRecord if it is that of another key."""
    where = f"{root.url}/{key}"
    return parse(unseal(root.read_bytes(key), where, key), kind, where)


def parse[M: BaseModel](text: bytes, kind: type[M], where: str) -> M:
    """A record from its JSON. Raises SchemaMismatch if it is not a record of this kind."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        flaws = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
        more = f" (and {len(flaws) - _SHOWN} more)" if len(flaws) > _SHOWN else ""
        fact = f"{where} is not a {kind.__name__} that this version reads: {'; '.join(flaws[:_SHOWN])}{more}"
        raise SchemaMismatch(f"{fact}. Restore it from a copy, or read it with the Ratchet that wrote it") from error


def seal(record: BaseModel, key: str | None = None) -> bytes:
    """JSON of a record with its key as `place`, and last, as `checksum`, the xxh3-128 of the text before it. `key` is
    None for a record that says otherwise where it belongs, as a manifest does."""
    body = record.model_dump_json(indent=1).encode().removesuffix(b"\n}")
    if key is not None:
        body += _PLACE + json.dumps(key).encode()
    return body + _SEAL + bytes_digest(body).encode() + _END


def unseal(data: bytes, where: str, key: str | None = None) -> bytes:
    """JSON without its checksum and its place, which are verified. `key` is where it was read, or None if its place
    does not matter. Raises DigestMismatch if the checksum does not match, WrongRecord if it belongs to another key."""
    body, _, tail = data.rpartition(_SEAL)
    if tail != bytes_digest(body).encode() + _END:
        fact = f"{where} is damaged: its text does not match the checksum at its end"
        raise DigestMismatch(f"{fact}. Restore the object from a copy")
    text, _, place = body.rpartition(_PLACE)
    if key is not None and (not text or place != json.dumps(key).encode()):
        raise misplaced(where, "record", place.decode(errors="replace") if text else "no place", key)
    return (text or body) + b"\n}"


def misplaced(where: str, what: str, of: str, key: str) -> WrongRecord:
    """The error for the record of another key at `key`: of a renamed run every record is one."""
    fact = f"{where} holds the {what} of {of}: it was copied or renamed by hand. Remove it, or restore the original"
    run = of.strip('"').partition("/")[0]
    if "/" not in of or key.startswith(f"{run}/"):
        return WrongRecord(fact)
    return WrongRecord(f"{fact}. The folder of run {run} keeps that name; `ratchet fork` copies a run under another")
