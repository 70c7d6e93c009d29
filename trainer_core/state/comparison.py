"""Compare two saved states bit for bit and by name, in one process. Importing this module does not import torch."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class StateComparison(BaseModel):
    """What was compared, and what differs."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    weights: int
    """Weight tensors compared; one tensor holds a kind of weight of all layers, the layer is its first index."""
    optimizer: int
    """Tensors of the optimizer compared: both moments and the main weights."""
    rng: int
    """Values of random generators compared; an array counts as one."""
    other: int
    """Further values compared: optimizer settings, schedule, and what `trainer.json` says."""
    elements: int
    """Numbers compared, over all tensors and arrays."""
    planted: str | None
    """Name of the weight tensor in which a bit was flipped before comparing."""
    differences: tuple[str, ...]
    """One line for each tensor or value that differs or is in one state only; the tensors first."""


def compare_states(left: Path, right: Path, plant: int | None = None) -> StateComparison:
    """Compare the states in two local folders. Only equal bits are equal: -0.0 is not 0.0, a NaN equals the same NaN.

    Memory holds one chunk of a tensor at a time. States of different layouts can be compared: tensors have one name and
    one shape under every layout; what each rank has on its own is then reported as in one state only.

    Args:
        left: folder with all files of a state.
        right: the same for another state.
        plant: if given, the lowest bit of one number of one weight of `right`, both chosen by this seed, is flipped
            after it is read, to show that the comparison finds it.

    Raises:
        StorageError: if a folder does not hold a whole, readable state.
    """
    from trainer_core.state.bitwise import compare  # imports torch

    found = compare(left, right, plant)
    counts = {name: found.counts[name] for name in ("weights", "optimizer", "rng", "other", "elements")}
    return StateComparison(**counts, planted=found.planted, differences=found.differences)
