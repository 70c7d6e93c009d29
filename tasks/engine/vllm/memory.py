"""Share of a card that the key-value cache may take. Imports without vLLM or torch."""

import json
from collections.abc import Callable
from pathlib import Path

from storage.errors import InputError
from tasks.engine.protocol import KV_CACHE_BYTES_ON_CPU, EngineSpec

_BYTES = {"float32": 4, "bfloat16": 2}
_BESIDE = 3 << 30  # CUDA context, activations of a step, CUDA graphs
_OF_LOGITS = 16  # bytes for each sequence and entry of the vocabulary: four arrays in fp32


def cache_bytes(spec: EngineSpec, of_card: Callable[[], int]) -> int:
    """Bytes that `spec.gpu_memory_utilization` of a card, of which `of_card` tells the bytes, leaves beside weights,
    logits and the rest; on CPU a fixed number. vLLM would measure it, but counts what the trainer takes from the same
    card in the meantime as its own. Raises InputError: it leaves nothing."""
    if spec.device == "cpu":
        return KV_CACHE_BYTES_ON_CPU
    folder, card = Path(spec.model_dir), of_card()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = _BYTES.get(str(config.get("dtype") or config.get("torch_dtype") or ""), 2)
    on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    weights = on_disk * _BYTES[spec.dtype] // stored // spec.tensor
    logits = _OF_LOGITS * spec.max_num_seqs * int(config.get("vocab_size", 0))
    left = int(card * spec.gpu_memory_utilization) - weights - logits - _BESIDE
    if left <= 0:
        needed = (weights + logits + _BESIDE) >> 20
        raise InputError(
            f"engine.gpu_memory_utilization is {spec.gpu_memory_utilization}: of a card of {card >> 20} MiB that "
            f"leaves nothing for the key-value cache beside {needed} MiB for weights, logits and activations. "
            "Raise it, lower engine.max_num_seqs, or give engine.kv_cache_mib"
        )
    return left
