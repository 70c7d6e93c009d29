"""The bit-for-bit comparison behind `trainer_core.state.comparison`. Imports torch."""

import io
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_core.state.facts import FACTS_FILE, OPTIMIZER_PREFIX, read_generators
from trainer_core.state.saved import Region, SavedState

_RNG = "rng/"
_SHOWN = 80  # characters of a value in a message
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


@dataclass(frozen=True)
class Findings:
    """What was compared, and what differs. The fields that are not described here are `StateComparison`'s."""

    counts: Counter[str]
    """How much was compared: weights, optimizer, rng, other and elements."""
    planted: str | None
    differences: tuple[str, ...]


def compare(left: Path, right: Path, plant: int | None) -> Findings:
    """See `trainer_core.state.comparison.compare_states`."""
    comparison = _Comparison(SavedState(left), SavedState(right))
    flaw = _Flaw.choose(comparison.right, plant) if plant is not None else None
    comparison.compare_tensors(flaw)
    comparison.compare_objects()
    return Findings(comparison.counts, flaw.name if flaw else None, tuple(comparison.differences))


@dataclass(frozen=True)
class _Flaw:
    """One bit to flip."""

    name: str
    """The tensor."""
    index: tuple[int, ...]
    """The element; its lowest bit is flipped."""

    @classmethod
    def choose(cls, state: SavedState, seed: int) -> "_Flaw":
        generator = random.Random(seed)
        weights = sorted(name for name in state.names if state.tensor(name) and not name.startswith(OPTIMIZER_PREFIX))
        name = generator.choice(weights)
        return cls(name, tuple(generator.randrange(length) for length in _shape(state, name)))

    def put_into(self, region: Region, values: torch.Tensor) -> None:
        """Flip the bit if the element is in `values`, which is the content of `region` of the tensor."""
        element = Region(self.index, (1,) * len(self.index))
        if element.overlap(region):
            _bits(values)[element.within(region)] ^= 1


@dataclass
class _Comparison:
    left: SavedState
    right: SavedState
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def compare_tensors(self, flaw: _Flaw | None) -> None:
        for name in sorted(self.left.names | self.right.names):
            if self.left.tensor(name) and self.right.tensor(name):
                self._compare_tensor(name, flaw if flaw and flaw.name == name else None)
            elif self.left.tensor(name) or self.right.tensor(name):
                self._one_sided(name)

    def compare_objects(self) -> None:
        for name in sorted(self.left.names | self.right.names):
            if self.left.tensor(name) or self.right.tensor(name):
                continue
            if name in self.left.names & self.right.names:
                self._compare_values(name, self.left.read_object(name), self.right.read_object(name))
            else:
                self._one_sided(name)
        for rank in range(max(state.facts.parallel.world_size for state in (self.left, self.right))):
            self._compare_generators(f"{_RNG}{rank}", rank)
        self._compare_values(FACTS_FILE, *(state.facts.model_dump(mode="json") for state in (self.left, self.right)))

    def _compare_generators(self, name: str, rank: int) -> None:
        left, right = (read_generators(str(state.folder), rank) for state in (self.left, self.right))
        if left is not None and right is not None:
            self._compare_values(name, left, right)
        elif left is not right:
            self.differences.append(f"{name}: only in {(self.right if left is None else self.left).folder}")

    def _one_sided(self, name: str) -> None:
        state = self.left if name in self.left.names else self.right
        self.differences.append(f"{name}: only in {state.folder}")

    def _compare_tensor(self, name: str, flaw: _Flaw | None) -> None:
        self.counts["optimizer" if name.startswith(OPTIMIZER_PREFIX) else "weights"] += 1
        kinds = [f"{_dtype(state, name)} {_shape(state, name)}" for state in (self.left, self.right)]
        if kinds[0] != kinds[1]:
            self.differences.append(f"{name}: {kinds[0]} against {kinds[1]}")
            return
        found = _Difference()
        for region in self.left.chunks(name):
            values = self.left.read(name, region), self.right.read(name, region)
            if flaw:
                flaw.put_into(region, values[1])
            found.add(region, *values)
        self._report(name, found)

    def _compare_values(self, name: str, left: object, right: object) -> None:
        values, others = dict(_leaves(left, name)), dict(_leaves(right, name))
        for path in [*values, *(path for path in others if path not in values)]:
            if path in values and path in others:
                self.counts["rng" if name.startswith(_RNG) else "other"] += 1
                self._compare_leaf(path, values[path], others[path])
            else:
                state = self.left if path in values else self.right
                self.differences.append(f"{path}: only in {state.folder}")

    def _compare_leaf(self, path: str, left: object, right: object) -> None:
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            kinds = [f"{value.dtype} {tuple(value.shape)}" for value in (left, right)]
            if kinds[0] == kinds[1]:
                found = _Difference()
                found.add(Region((0,) * left.ndim, tuple(left.shape)), left, right)
                self._report(path, found)
            else:
                self.differences.append(f"{path}: {kinds[0]} against {kinds[1]}")
            return
        self.counts["elements"] += 1
        if _fingerprint(left) != _fingerprint(right):
            self.differences.append(f"{path}: {_shown(left)} against {_shown(right)}")

    def _report(self, name: str, found: "_Difference") -> None:
        self.counts["elements"] += found.elements
        if found.differing:
            self.differences.append(
                f"{name}: {found.differing} of {found.elements} elements differ, first at {found.first}"
            )


@dataclass
class _Difference:
    """What was found in the regions of one tensor so far."""

    elements: int = 0
    differing: int = 0
    first: str = ""

    def add(self, region: Region, left: torch.Tensor, right: torch.Tensor) -> None:
        self.elements += left.numel()
        unequal = (_bits(left) != _bits(right)).reshape(-1)
        if not unequal.any():
            return
        if not self.differing:
            at = int(unequal.int().argmax())
            inner = np.unravel_index(at, region.shape) if region.shape else ()
            index = tuple(int(begin + step) for begin, step in zip(region.start, inner, strict=True))
            self.first = f"{index}: {_number(left, at)} against {_number(right, at)}"
        self.differing += int(unequal.sum())


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers of the same size."""
    return values.view(_BITS[values.element_size()])


def _number(values: torch.Tensor, at: int) -> str:
    """A number in full; a NaN with its bits, because NaNs differ in nothing else."""
    flat = values.reshape(-1)
    number = flat[at].item()
    bits = int(_bits(flat)[at]) & ((1 << 8 * values.element_size()) - 1)
    return f"{number!r}" if number == number else f"{number!r} (bits {bits:#x})"


def _shape(state: SavedState, name: str) -> tuple[int, ...]:
    found = state.tensor(name)
    return tuple(found.size) if found else ()


def _dtype(state: SavedState, name: str) -> str:
    found = state.tensor(name)
    return str(found.properties.dtype) if found else ""


def _leaves(value: Any, name: str) -> Iterator[tuple[str, object]]:
    """The values in nested dictionaries, lists and tuples, by their paths; an array or row of integers is one value."""
    if isinstance(value, np.ndarray):
        yield name, torch.from_numpy(value)
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}")
    elif isinstance(value, list | tuple) and value:
        if all(type(item) is int for item in value):
            yield name, torch.tensor(value)
        else:
            for place, item in enumerate(value):
                yield from _leaves(item, f"{name}[{place}]")
    else:
        yield name, value


def _fingerprint(value: object) -> bytes:
    return value.getvalue() if isinstance(value, io.BytesIO) else pickle.dumps(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
