"""Records that no Ratchet writes, with a valid seal."""

from storage.digest import bytes_digest
from storage.manifest import Manifest, Part
from storage.records import seal


def forged_part(part: Part, **changes) -> Part:
    """`part` with unchecked changes."""
    return Part.model_construct(**{**part.model_dump(), **changes})


def forged(manifest: Manifest, **changes) -> bytes:
    """The sealed text of a manifest with unchecked changes."""
    return seal(manifest.model_copy(update=changes))


def sealed_again(text: bytes) -> bytes:
    """A changed text, sealed again."""
    body, end, tail = text.rpartition(b',\n "checksum": "')
    return body + end + bytes_digest(body).encode() + tail[32:]
