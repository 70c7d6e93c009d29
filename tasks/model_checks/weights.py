"""Check that the safetensors files of a model are whole and hold the tensors of its config.json.

It reads headers only, so it takes milliseconds however large the model is."""

import json
import struct
from collections.abc import Mapping
from typing import Any

from storage.errors import InputError
from tasks.data.generated import shapes
from tasks.data.hub import INDEX
from tasks.data.models import ModelFolder
from tasks.model_checks.architectures import LLAMA_LIKE, architecture_of

Shape = tuple[int, ...]

_LENGTH = 8
_LONGEST_HEADER = 100 << 20  # as safetensors itself
_TYPES = {"F32", "BF16", "F16"}
_HEAD = "lm_head.weight"
_REPAIR = "take the config.json that belongs to the weights"


def check_weights(folder: ModelFolder, facts: Mapping[str, Any]) -> None:
    """Raises InputError, naming the file or the tensor: weights are not whole, quantized, or do not fit config.json."""
    sizes, found = folder.files(), dict[str, Shape]()
    for name in folder.weights():
        found |= _tensors(folder, name, sizes[name])
    named = folder.document(INDEX)["weight_map"] if INDEX in sizes else ()
    if missing := sorted(set(named) - set(found)):
        raise InputError(f"{folder}: {INDEX} names {missing[0]}, which none of its files has: copy the model again")
    if architecture_of(facts, str(folder)) in LLAMA_LIKE:
        _compare(facts, found, str(folder))


def _tensors(folder: ModelFolder, name: str, size: int) -> dict[str, Shape]:
    """Names and shapes of the tensors in a file, after its header is compared with its size."""
    length = struct.unpack("<Q", folder.read(name, 0, _LENGTH))[0] if size >= _LENGTH else 0
    if not 0 < length <= min(size - _LENGTH, _LONGEST_HEADER):
        raise InputError(f"{folder}: {name} is not a safetensors file, or is cut off: copy the model again")
    try:
        header = json.loads(folder.read(name, _LENGTH, _LENGTH + length))
        tensors = {key: value for key, value in header.items() if key != "__metadata__"}
        ends = [value["data_offsets"][1] for value in tensors.values()]
        found = {key: tuple(map(int, value["shape"])) for key, value in tensors.items()}
        types = {key: value["dtype"] for key, value in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{folder}: the header of {name} is damaged ({error!r}): copy the model again") from None
    expected = _LENGTH + length + max(ends, default=0)
    if size != expected:
        raise InputError(f"{folder}: {name} has {size} bytes, but its header describes {expected}: copy it again")
    for tensor, kind in types.items():
        if kind not in _TYPES:
            raise InputError(f"{folder}: {tensor} in {name} is of type {kind}: use the model in bf16 or fp32")
    return found


def _compare(facts: Mapping[str, Any], found: Mapping[str, Shape], where: str) -> None:
    expected = dict(shapes({**facts, "tie_word_embeddings": False}))  # one that is tied may be there too
    for name, shape in expected.items():
        if name not in found and not (name == _HEAD and facts.get("tie_word_embeddings")):
            raise InputError(f"{where}: the weights lack {name}, which config.json asks for: {_REPAIR}")
        if found.get(name, shape) != shape:
            fact = f"has the shape {list(found[name])}, but config.json describes {list(shape)}"
            raise InputError(f"{where}: {name} {fact}: {_REPAIR}")
    layers = {name for name in found if name.startswith("model.layers.")}
    if more := sorted(layers - set(expected) - {name for name in layers if "rotary_emb" in name}):
        raise InputError(f"{where}: the weights hold {more[0]}, which config.json does not describe: {_REPAIR}")
