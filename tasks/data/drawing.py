"""Drawing prompts by a cursor: an endless stream over a table, in passes or as a mixture of sources."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from storage.errors import InputError

_LONGEST = 100_000  # positions until the pattern of a mixture repeats
_EXACT = 10_000


@dataclass(frozen=True)
class Share:
    rows: int  # its rows; those of the next source follow them in the table
    weight: float


def draw(
    rows: int, cursor: int, count: int, seed: int, shuffle: bool, shares: Sequence[Share] = ()
) -> NDArray[np.int64]:
    """Row numbers of the next `count` prompts of an endless stream over a table of `rows` rows. Each pass has its own
    order, derived from `seed` and the number of the pass, so the cursor, the number of prompts drawn before, alone is
    the state. Of a mixture each share has passes of its own. Returns (count,) int64."""
    positions = np.arange(cursor, cursor + count)
    if len(shares) < 2:
        return _in_passes(rows, positions, [seed], shuffle)
    source, place = _mixed(positions, whole_weights([share.weight for share in shares]))
    starts = np.cumsum([0, *(share.rows for share in shares)])
    drawn = np.empty(count, dtype=np.int64)
    for number, share in enumerate(shares):
        mine = source == number
        drawn[mine] = starts[number] + _in_passes(share.rows, place[mine], [seed, number], shuffle)
    return drawn


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Weights as the least whole numbers in proportion, to four decimals. Raises InputError: their sum is too large."""
    parts = [Fraction(str(weight)).limit_denominator(_EXACT) for weight in weights]
    common = math.lcm(*(part.denominator for part in parts))
    counts = [int(part * common) for part in parts]
    counts = [count // math.gcd(*counts) for count in counts]
    if min(counts) < 1 or sum(counts) > _LONGEST:
        raise InputError(
            f"the weights {', '.join(map(str, weights))} of data.train have no common pattern of at most {_LONGEST} "
            "prompts: give small whole numbers, such as 3 and 1"
        )
    return counts


def repetitions(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Earlier occurrences of each entry, (count,) int64: where two passes meet, a draw may hold a prompt twice."""
    order = np.argsort(rows, kind="stable")
    places, found = np.arange(len(rows)), np.empty(len(rows), dtype=np.int64)
    starts = np.r_[True, rows[order][1:] != rows[order][:-1]] if len(rows) else np.empty(0, dtype=bool)
    found[order] = places - np.maximum.accumulate(np.where(starts, places, 0))
    return found


def _in_passes(rows: int, positions: NDArray[np.int64], seed: Sequence[int], shuffle: bool) -> NDArray[np.int64]:
    turns = positions // rows
    drawn = np.empty(len(positions), dtype=np.int64)
    for turn in np.unique(turns):
        order = np.random.default_rng([*seed, int(turn)]).permutation(rows) if shuffle else np.arange(rows)
        drawn[turns == turn] = order[positions[turns == turn] % rows]
    return drawn


def _mixed(positions: NDArray[np.int64], counts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The source of each position of the stream, and how many earlier positions are of the same source. A pattern with
    `counts[i]` places of source i, spread evenly, is repeated for ever."""
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    sources = np.repeat(np.arange(len(counts)), counts)
    pattern = sources[np.lexsort((sources, places))]
    before = repetitions(pattern)
    turns, offsets = positions // len(pattern), positions % len(pattern)
    return pattern[offsets], turns * np.array(counts)[pattern[offsets]] + before[offsets]
