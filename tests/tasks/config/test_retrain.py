"""Names of selections and states, and the order in which shares are trained on."""

from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from storage.errors import InputError
from tasks.config.retrain import Place, RetrainSection, moment_before, place_of, state_of


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("demo", Place(None, "demo", 1, None)),
        ("demo@7", Place(None, "demo", 7, 7)),
        ("demo@3-9", Place(None, "demo", 3, 9)),
        ("demo@3-", Place(None, "demo", 3, None)),
        ("s3://bucket/runs//demo@3-9", Place("s3://bucket/runs", "demo", 3, 9)),
        ("file:///data//demo", Place("file:///data", "demo", 1, None)),
        ("/data/runs//demo@0", Place("/data/runs", "demo", 0, 0)),
    ],
)
def test_a_place_is_a_run_with_iterations_and_a_root(text, place):
    assert place_of(text) == place


@pytest.mark.parametrize("text", ["", "demo@", "demo@x", "s3://demo", "//demo", "Demo", "demo@9-3", "demo@-3", "a@1@2"])
def test_other_forms_are_refused(text):
    with pytest.raises(InputError):
        place_of(text)


@pytest.mark.parametrize("text", ["demo", "demo@3-9", "demo@3-"])
def test_a_state_is_one_iteration(text):
    with pytest.raises(InputError, match="does not name one state"):
        state_of(text)


@pytest.mark.parametrize(
    ("age", "moment"), [("90m", "2026-03-01T10:30"), ("24h", "2026-02-28T12:00"), ("7d", "2026-02-22T12:00")]
)
def test_an_age_is_counted_back(age, moment):
    now = datetime(2026, 3, 1, 12, 0, 0, 5, UTC)
    assert moment_before(age, now) == datetime.fromisoformat(f"{moment}:00+00:00")


@pytest.mark.parametrize("age", ["", "24", "h", "-3h", "1y", "1.5h"])
def test_other_ages_are_refused(age):
    with pytest.raises(InputError, match="24h or 7d"):
        moment_before(age, datetime.now(UTC))


def section(**given) -> RetrainSection:
    return RetrainSection.model_validate({"start": "run@1", "select": ["run"], **given})


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_share_is_trained_on_once_in_an_epoch(shuffle):
    given = section(epochs=3, shuffle=shuffle)
    order = [given.share(iteration, 7, seed=5) for iteration in range(1, given.iterations(7) + 1)]
    epochs = [order[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert (len({tuple(epoch) for epoch in epochs}) > 1) is shuffle


@pytest.mark.parametrize(
    "given",
    [
        {"start": "run"},
        {"select": []},
        {"select": ["run@"]},
        {"since": "2026-01-01T00:00:00"},
        {"limit": 0},
        {"more": 1},
    ],
)
def test_what_cannot_be_used_is_refused(given):
    with pytest.raises(ValidationError):
        section(**given)


def test_a_root_with_credentials_is_refused():
    with pytest.raises(ValidationError, match="credentials"):
        section(select=["s3://key:secret@host/runs//demo"])
