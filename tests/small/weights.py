"""The weights of small workers: their layers, log-probabilities by them, and the plan of an update."""

import numpy as np

from trainer_core.lora import factor_name, module_of
from trainer_core.weights.plan import Bucket, PlannedTensor, WeightPlan

SIZE = 16384  # float32 in each array: with two ranks 32 KiB per file
LAYERS = tuple(f"model.layers.{layer}.weight" for layer in range(4))
LAYER = SIZE // len(LAYERS)  # float32 in each, in the order of the weights


def logprobs_of(weights, sequence):
    """Log-probability of each token but the first, nat; each side computes it from its own weights."""
    tokens = np.asarray(sequence)
    return -np.abs(weights[tokens[1:] % SIZE] + weights[tokens[:-1] % SIZE]).astype(np.float32)


def layers_of(weights):
    """Views of the layers by name, (LAYER,) float32 each."""
    return dict(zip(LAYERS, np.split(weights, len(LAYERS)), strict=True))


def plan_of(version, ranks):
    """A bucket for each layer; the ranks of a pipeline send theirs."""
    tensors = [
        PlannedTensor(name=name, dtype="float32", shape=(LAYER,), bucket=place, offset=0)
        for place, name in enumerate(LAYERS)
    ]
    senders = [place * min(ranks, len(LAYERS)) // len(LAYERS) for place in range(len(LAYERS))]
    buckets = [Bucket(number=place, sender=sender, nbytes=4 * LAYER) for place, sender in enumerate(senders)]
    return WeightPlan(version=version, tensors=tuple(tensors), buckets=tuple(buckets), arena_bytes=4 * LAYER)


def factor_of(layer):
    """Name of the factor of a layer's adapter."""
    return factor_name(layer.removesuffix(".weight"), "B")


def layer_of(name):
    """The layer that a factor belongs to; a layer is itself."""
    return f"{module_of(name)}.weight" if ".lora_" in name else name
