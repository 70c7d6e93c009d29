"""A digest of tensors that costs about one read of the memory and is the same on every device."""

import hashlib
from collections.abc import Sequence

import torch

_WORD = 8  # bytes
_CHUNK = 1 << 22  # words; bounds the temporary memory to a few times 32 MiB
_K1 = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed word: spreads the positions
_K2 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 of splitmix64 as a signed word: carries each bit into the higher ones


def dtype_name(dtype: torch.dtype) -> str:
    """Name of an element type without torch's prefix, as `TensorRecord.dtype` has it."""
    return str(dtype).removeprefix("torch.")


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of type, shape and bytes, 32 hexadecimal characters.

    The bytes are read as little-endian 64-bit words w[i]; each is mixed with its position and the results are added
    modulo 2**64, so swapped, moved or zeroed words change it. Signed wrap-around arithmetic is the same on CPU and GPU.
    The digest detects accidents, not adversaries.
    """
    words = _words(tensor)
    total = 0
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK]
        positions = torch.arange(start, start + part.numel(), dtype=torch.int64, device=words.device)
        total += int(mix(part, positions).sum())
    head = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)} {total % 2**64:016x}"
    return hashlib.blake2b(head.encode(), digest_size=16).hexdigest()


def tensor_digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """`tensor_digest` of each."""
    return [tensor_digest(tensor) for tensor in tensors]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # (bytes,)
    missing = -octets.numel() % _WORD
    if missing:
        octets = torch.nn.functional.pad(octets, (0, missing))
    elif octets.storage_offset() % _WORD:
        octets = octets.clone()  # a view as words must start at a whole word
    return octets.view(torch.int64)  # (bytes / 8,)


def mix(words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Each word mixed with its position, (n,) int64 all three; their sum changes with every word that changes or moves.

    The words need not be in order, so that the sums of the shards of a tensor add up to that of the tensor.
    """
    mixed = words ^ ((positions + 1) * _K1)
    mixed = (mixed ^ (mixed >> 32)) * _K2
    return mixed ^ (mixed >> 29)
