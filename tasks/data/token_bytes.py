"""Bytes that each token of a tokenizer adds to a text."""

from storage.errors import InputError
from tasks.data.backends import Backend

_BEFORE = "a"
_BATCH = 1 << 14
_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_PRINTED = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTES = {chr(byte): byte for byte in _PRINTED} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""The signs by which byte-level tokenizers write bytes (GPT-2's `bytes_to_unicode`, inverted)."""


def token_bytes(backend: Backend) -> list[bytes]:
    """The bytes that each token, special ones included, adds to a text when it follows another, by id. Raises
    InputError: the text of a token depends on the one before it."""
    (before,) = backend.encode([_BEFORE])
    (begun,) = backend.decode([before])
    found: list[bytes] = []
    for first in range(0, backend.size, _BATCH):
        ids = range(first, min(first + _BATCH, backend.size))
        texts = backend.decode([[*before, one] for one in ids])
        found += [_added(backend, one, begun, text) for one, text in zip(ids, texts, strict=True)]
    return found


def _added(backend: Backend, token: int, begun: str, text: str) -> bytes:
    if not text.startswith(begun):
        raise InputError(
            f"rollout.stop cannot be used with this tokenizer: its token {token} changes the text before it ({text!r} "
            f"after {begun!r}). Set rollout.stop_tokens instead"
        )
    added = text.removeprefix(begun)
    return _raw(backend.token_text(token)) or added.encode() if _UNDECODED in added else added.encode()


def _raw(written: str) -> bytes:
    """Bytes of a token that are no UTF-8 by themselves; none if the tokenizer does not write bytes so."""
    if len(written) == len("<0x00>") and written.startswith("<0x"):
        return bytes.fromhex(written[3:5])
    return bytes(_BYTES[sign] for sign in written) if all(sign in _BYTES for sign in written) else b""
