"""Share of groups of samples without anything to learn from."""

import numpy as np
import pyarrow as pa


def equal_groups(rewards: pa.Table) -> float:
    """Share of the prompt groups of a reward table in which no sample can have an advantage: all scores are equal, or
    fewer than two samples have one. 0 to 1."""
    names = rewards["prompt_id"].combine_chunks().dictionary_encode()
    scores = rewards["reward"].cast(pa.float64()).to_numpy()  # NaN where there is none
    groups = names.indices.to_numpy()
    scored = np.isfinite(scores)
    count = len(names.dictionary)
    highest, lowest = np.full(count, -np.inf), np.full(count, np.inf)
    np.maximum.at(highest, groups[scored], scores[scored])
    np.minimum.at(lowest, groups[scored], scores[scored])
    return float(np.mean(highest <= lowest))
