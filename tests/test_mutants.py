"""The known faults fit the code: each can be applied, and has tests that could notice it."""

import functools
import re
from collections import Counter

from infra.mutants import MUTANTS, PROJECT
from infra.mutants_known import Mutant

LEFT_TO_CI = 47
"""Faults whose tests are all slow, so that CI alone can notice them. This number may only fall."""
SLOW = re.compile(r"^(@|pytestmark = )pytest\.mark\.(slow|full)$", re.MULTILINE)


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


def is_quick(place: str) -> bool:
    """True if `make test-fast` runs that test, or one of that file or folder."""
    path, _, name = place.partition("::")
    files = [path] if path.endswith(".py") else [str(one) for one in (PROJECT / path).rglob("test_*.py")]
    wanted = re.compile(rf"^def {name.partition('[')[0]}\(" if name else r"^def test_", re.MULTILINE)
    blocks = [text_of(file).split("\n\n\n") for file in files]
    return any(
        wanted.search(one) and not SLOW.search(some[0]) and not SLOW.search(one) for some in blocks for one in some
    )


def test_quick_tests_could_notice_all_faults_but_those_that_are_left_to_ci():
    assert sum(not any(map(is_quick, mutant.tests)) for mutant in MUTANTS) <= LEFT_TO_CI
