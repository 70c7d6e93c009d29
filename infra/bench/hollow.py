"""A model directory of any size: its file of weights is sparse, reads as zeros and takes no disk."""

import json
import math
from pathlib import Path

from infra.bench.latent import BIAS, LatentModel
from tasks.config.model import GeneratedModel
from tasks.data.generated import generate_tokenizer, model_config, shapes
from trainer_core.config import Precision

_NAMES = {"fp32": "float32", "bf16": "bfloat16"}
_STORED = {"fp32": ("F32", 4), "bf16": ("BF16", 2)}  # as safetensors calls it; bytes


def hollow_model(directory: Path, spec: GeneratedModel | LatentModel, precision: Precision) -> int:
    """Write a model with weights of zero in that precision; returns their bytes.

    The format is that of https://github.com/huggingface/safetensors: length of the header, header, data.
    """
    latent = isinstance(spec, LatentModel)
    generate_tokenizer(directory, GeneratedModel(vocabulary=spec.vocabulary))
    config = (spec.config() if latent else model_config(spec)) | {"dtype": _NAMES[precision]}
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in spec.shapes() if latent else shapes(config):
        stored, size = _STORED["fp32" if name.endswith(BIAS) else precision]
        begin, end = end, end + size * math.prod(shape)
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end
