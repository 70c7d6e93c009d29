"""Records that no Ratchet writes, with a valid seal."""

from typing import Literal

from pydantic import ConfigDict

from storage.digest import bytes_digest
from storage.manifest import Manifest, Part
from storage.records import seal


def forged_part(part: Part, **changes) -> Part:
    """`part` with unchecked changes."""
    return Part.model_construct(**{**part.model_dump(), **changes})


def forged(manifest: Manifest, **changes) -> bytes:
    """The sealed text of a manifest with unchecked changes."""
    return seal(manifest.model_copy(update=changes))


def as_earlier(manifest: Manifest, form: Literal["null", "strings", "constants"], **metrics: float) -> bytes:
    """The sealed text of a manifest with metrics that need not be finite, in one of the forms of earlier versions."""

    class EarlierManifest(Manifest):
        model_config = ConfigDict(ser_json_inf_nan=form)

    return seal(EarlierManifest.model_construct(**{**vars(manifest), "metrics": metrics}))


def sealed_again(text: bytes) -> bytes:
    """A changed text, sealed again."""
    body, end, tail = text.rpartition(b',\n "checksum": "')
    return body + end + bytes_digest(body).encode() + tail[32:]
