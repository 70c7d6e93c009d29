"""A model directory of any size in no time: its file of weights is a hole, which reads as zeros and takes no room."""

import json
from pathlib import Path

from tasks.config.model import GeneratedModel
from tasks.data.generated import generate_tokenizer, shapes
from trainer_core.config import Precision

_TYPES = {"fp32": ("F32", "float32", 4), "bf16": ("BF16", "bfloat16", 2)}  # safetensors' name, torch's, bytes


def hollow_model(directory: Path, spec: GeneratedModel, precision: Precision) -> int:
    """Write what `generate_model` would, with weights of zero in that precision; returns their bytes.

    The format is that of https://github.com/huggingface/safetensors: length of the header, header, data.
    """
    generate_tokenizer(directory, spec)
    stored, name, size = _TYPES[precision]
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"dtype": name}, indent=1), encoding="utf-8")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight, shape in shapes(spec):
        begin = end
        for length in shape:
            size *= length
        end, size = begin + size, _TYPES[precision][2]
        header[weight] = {"dtype": stored, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end
