"""Compare two saved states bit for bit and by name, in one process. Imports torch."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_core.state.facts import CRITIC, FACTS_FILE, OPTIMIZER_PREFIX, StateComparison, read_generators
from trainer_core.state.files import Region, SavedState, bits

_RNG = "rng/"
_SHOWN = 80  # characters of a value in a message


def compare_states(left: Path, right: Path, plant: int | None = None) -> StateComparison:
    """Compare the states in two local folders. Only equal bits are equal: -0.0 is not 0.0, a NaN equals the same NaN.
    Memory holds one box of a tensor at a time. States of different layouts can be compared: tensors have one name and
    one shape under every layout. The generators of a rank that only one layout has are reported as in one state only.
    With `plant`, a seed, the lowest bit of a number of a weight of `right` is flipped after it is read, to show that
    the comparison finds it. A critic is compared alike. Raises StorageError if a folder does not hold a whole, readable
    state."""
    found, critics = _Comparison(SavedState(left), SavedState(right)), [Path(one, CRITIC) for one in (left, right)]
    flaw = _Flaw.choose(found.right, plant) if plant is not None else None
    found.compare(flaw)
    held = [folder for folder in critics if folder.exists()]
    if len(held) == 1:
        found.differences.append(f"{CRITIC}: only in {held[0].parent}")
    elif held:
        critic = _Comparison(*map(SavedState, critics), counts=found.counts)
        critic.compare(None)
        found.differences += [f"{CRITIC}/{line}" for line in critic.differences]
    counts = {name: found.counts[name] for name in ("weights", "optimizer", "rng", "other", "elements")}
    return StateComparison(**counts, planted=flaw.name if flaw else None, differences=tuple(found.differences))


@dataclass(frozen=True)
class _Flaw:
    name: str  # the tensor
    index: tuple[int, ...]  # the element; its lowest bit is flipped

    @classmethod
    def choose(cls, state: SavedState, seed: int) -> "_Flaw":
        generator = random.Random(seed)
        name = generator.choice(sorted(name for name in state.tensors if not name.startswith(OPTIMIZER_PREFIX)))
        return cls(name, tuple(generator.randrange(length) for length in state.tensors[name].size))

    def put_into(self, region: Region, values: torch.Tensor) -> None:
        """Flip the bit if the element is in `values`, the content of `region` of the tensor."""
        element = Region(self.index, (1,) * len(self.index))
        if element.overlap(region):
            bits(values)[element.within(region)] ^= 1


@dataclass
class _Comparison:
    left: SavedState
    right: SavedState
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    @property
    def sides(self) -> tuple[SavedState, SavedState]:
        return self.left, self.right

    def compare(self, flaw: _Flaw | None) -> None:
        for name in sorted({*self.left.tensors, *self.right.tensors}):
            if name in self.left.tensors and name in self.right.tensors:
                self._compare_tensor(name, flaw if flaw and flaw.name == name else None)
            else:
                self._one_sided(name, name in self.left.tensors)
        sizes = [state.facts.parallel.world_size for state in self.sides]
        for rank in range(max(sizes)):
            if rank < min(sizes):
                self._compare_values(f"{_RNG}{rank}", *(read_generators(state.folder, rank) for state in self.sides))
            else:
                self._one_sided(f"{_RNG}{rank}", rank < sizes[0])
        self._compare_values(FACTS_FILE, *(one.facts.model_dump(mode="json") for one in self.sides))

    def _compare_values(self, name: str, left: object, right: object) -> None:
        values, others = dict(_leaves(left, name)), dict(_leaves(right, name))
        for path in {**values, **others}:
            if path in values and path in others:
                self.counts["rng" if name.startswith(_RNG) else "other"] += 1
                self._compare_leaf(path, values[path], others[path])
            else:
                self._one_sided(path, path in values)

    def _one_sided(self, name: str, left: bool) -> None:
        self.differences.append(f"{name}: only in {(self.left if left else self.right).folder}")

    def _compare_tensor(self, name: str, flaw: _Flaw | None) -> None:
        self.counts["optimizer" if name.startswith(OPTIMIZER_PREFIX) else "weights"] += 1
        one, other = (f"{state.tensors[name].dtype} {state.tensors[name].size}" for state in self.sides)
        if one != other:
            self.differences.append(f"{name}: {one} against {other}")
            return
        found = _Difference()
        for region in self.left.chunks(name):
            right = self.right.read(name, region)
            if flaw:
                flaw.put_into(region, right := right.clone())
            found.add(region, self.left.read(name, region), right)
        self._report(name, found)

    def _compare_leaf(self, path: str, left: object, right: object) -> None:
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            one, other = (f"{value.dtype} {tuple(value.shape)}" for value in (left, right))
            if one == other:
                found = _Difference()
                found.add(Region((0,) * left.ndim, tuple(left.shape)), left, right)
                self._report(path, found)
            else:
                self.differences.append(f"{path}: {one} against {other}")
            return
        self.counts["elements"] += 1
        if repr(left) != repr(right):  # of plain JSON: equal only with equal type and bits
            self.differences.append(f"{path}: {_shown(left)} against {_shown(right)}")

    def _report(self, name: str, found: "_Difference") -> None:
        self.counts["elements"] += found.elements
        if found.differing:
            how_many = f"{found.differing} of {found.elements} elements differ"
            self.differences.append(f"{name}: {how_many}, first at {found.first}")


@dataclass
class _Difference:
    elements: int = 0
    differing: int = 0
    first: str = ""

    def add(self, region: Region, left: torch.Tensor, right: torch.Tensor) -> None:
        self.elements += left.numel()
        unequal = (bits(left) != bits(right)).reshape(-1)
        if not unequal.any():
            return
        if not self.differing:
            at = int(unequal.int().argmax())
            inner = np.unravel_index(at, region.shape) if region.shape else ()
            index = tuple(int(begin + step) for begin, step in zip(region.start, inner, strict=True))
            self.first = f"{index}: {_number(left, at)} against {_number(right, at)}"
        self.differing += int(unequal.sum())


def _number(values: torch.Tensor, at: int) -> str:
    """A number in full; a NaN with its bits, because NaNs differ in nothing else."""
    flat = values.reshape(-1)
    number = flat[at].item()
    word = int(bits(flat)[at]) & ((1 << 8 * values.element_size()) - 1)
    return f"{number!r}" if number == number else f"{number!r} (bits {word:#x})"


def _leaves(value: Any, name: str) -> Iterator[tuple[str, object]]:
    """The values in nested JSON objects and arrays, by their paths; a row of integers is one value."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}")
    elif isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            yield name, torch.tensor(value)
        else:
            for place, item in enumerate(value):
                yield from _leaves(item, f"{name}[{place}]")
    else:
        yield name, value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
