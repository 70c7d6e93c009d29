"""A few operations of the fuzz: it finds nothing in sound code, and it notices the faults that it must find."""

import pytest

from infra import fuzz
from storage.backends.root import Root


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_some_operations_find_nothing(ahead):
    made = fuzz.fuzz(1, 8, ahead)
    assert made.findings == []
    assert made.wild.killed + sum(count for name, count in made.done.items() if name.startswith("harm")) > 0


@pytest.mark.slow
def test_a_harm_that_changes_a_run_without_a_word_is_found(monkeypatch):
    """Manifests are not written twice: the run repeats an iteration that is lost."""

    def choosing(_chance, root: Root, keys: list[str]):
        return "lost everything", lambda: [root.remove(key) for key in keys if "/manifests/000002/" in key]

    monkeypatch.setattr(fuzz, "draw", choosing)
    assert any("silently another" in one for one in fuzz.fuzz(3, 3).findings)
