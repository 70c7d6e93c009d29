"""The known faults fit the code: each can be applied, and has tests that could notice it."""

from collections import Counter

import pytest

from infra.mutants import MUTANTS, PROJECT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_known_fault_fits_the_code(mutant):
    assert (PROJECT / mutant.file).read_text(encoding="utf-8").count(mutant.before) == 1
    assert mutant.before != mutant.after
    for place in mutant.tests:
        path, _, name = place.partition("::")
        assert (PROJECT / path).exists(), place
        assert f"def {name.partition('[')[0]}(" in (PROJECT / path).read_text(encoding="utf-8") if name else True


def test_no_two_faults_have_the_same_name():
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
