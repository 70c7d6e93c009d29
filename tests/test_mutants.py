"""The known faults fit the code: each can be applied, and has tests that could notice it."""

import functools
from collections import Counter

from infra.mutants import MUTANTS, PROJECT
from infra.mutants_known import Mutant


@functools.cache
def text_of(path: str) -> str:
    return (PROJECT / path).read_text(encoding="utf-8")


def has(place: str) -> bool:
    """True if there is such a file, folder or test."""
    path, _, name = place.partition("::")
    return f"def {name.partition('[')[0]}(" in text_of(path) if name else (PROJECT / path).exists()


def fits(mutant: Mutant) -> bool:
    applies = text_of(mutant.file).count(mutant.before) == 1 and mutant.before != mutant.after
    return applies and all(map(has, mutant.tests))


def test_each_known_fault_fits_the_code():
    assert [mutant.name for mutant in MUTANTS if not fits(mutant)] == []


def test_no_two_faults_have_the_same_name():
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
