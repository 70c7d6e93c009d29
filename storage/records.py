"""Small JSON records that carry the digest of their own text, so that a flipped bit is detected as in any part."""

from pydantic import BaseModel, ValidationError

from storage.backends.root import Root
from storage.digest import bytes_digest
from storage.errors import DigestMismatch, SchemaMismatch

_SEAL = b',\n "checksum": "'
_END = b'"\n}\n'
_SHOWN = 3  # flaws of a record that a message names


def publish(root: Root, key: str, record: BaseModel, durable: bool = True) -> bool:
    """Write a record unless its key is taken; `durable` and the result are those of `Root.put_if_absent`."""
    return root.put_if_absent(key, seal(record), durable)


def read[M: BaseModel](root: Root, key: str, kind: type[M]) -> M:
    """The record at `key`.

    Raises:
        NotCommitted: there is none.
        DigestMismatch: its text is not what was written.
        SchemaMismatch: it is not a record of this kind.
    """
    return parse(unseal(root.read_bytes(key), f"{root.url}/{key}"), kind, f"{root.url}/{key}")


def parse[M: BaseModel](text: bytes, kind: type[M], where: str) -> M:
    """A record from its JSON.

    Raises:
        SchemaMismatch: it is not a record of this kind.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        flaws = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
        more = f" (and {len(flaws) - _SHOWN} more)" if len(flaws) > _SHOWN else ""
        raise SchemaMismatch(
            f"{where} is not a {kind.__name__} that this version reads: {'; '.join(flaws[:_SHOWN])}{more}. "
            "Restore it from a copy, or read it with the Ratchet that wrote it"
        ) from error


def seal(record: BaseModel) -> bytes:
    """JSON of a record with the xxh3-128 of the text before it as the last member, `checksum`."""
    body = record.model_dump_json(indent=1).encode().removesuffix(b"\n}")
    return body + _SEAL + bytes_digest(body).encode() + _END


def unseal(data: bytes, where: str) -> bytes:
    """JSON without its checksum, which is verified.

    Raises:
        DigestMismatch: it does not match.
    """
    body, _, tail = data.rpartition(_SEAL)
    if tail != bytes_digest(body).encode() + _END:
        raise DigestMismatch(
            f"{where} is damaged: its text does not match the checksum at its end. Restore the object from a copy"
        )
    return body + b"\n}"


def unseal_older(data: bytes, where: str) -> bytes:
    """Like `unseal`, for a record that earlier versions wrote without a checksum and without a newline at its end.

    Damage in one place does not make a sealed record look like one of those.
    """
    return data if _SEAL not in data and not data.endswith(b"\n") else unseal(data, where)
