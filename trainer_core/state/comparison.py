"""Compare two saved states bit for bit and by name, in one process. Importing this module does not import torch."""

from pathlib import Path

from trainer_core.state.facts import StateComparison


def compare_states(left: Path, right: Path, plant: int | None = None) -> StateComparison:
    """Compare the states in two local folders. Only equal bits are equal: -0.0 is not 0.0, a NaN equals the same NaN.

    Memory holds one box of a tensor at a time. States of different layouts can be compared: tensors have one name and
    one shape under every layout. The generators of a rank that only one layout has are reported as in one state only.

    Args:
        left: folder with all files of a state.
        right: the same for another state.
        plant: if given, the lowest bit of one number of one weight of `right`, both chosen by this seed, is flipped
            after it is read, to show that the comparison finds it.

    Raises:
        StorageError: if a folder does not hold a whole, readable state.
    """
    from trainer_core.state.bitwise import compare  # imports torch

    return compare(left, right, plant)
