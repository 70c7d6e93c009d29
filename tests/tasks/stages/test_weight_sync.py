import numpy as np
import pytest

from storage.errors import SyncMismatch
from tasks.config.run import SyncSection
from tasks.stages.weight_sync import agree

SECTION = SyncSection(max_mean_difference=1e-3, max_difference=5e-3)
LOGPROBS = [np.array([-0.5, -2.0], dtype=np.float32), np.array([-1.0], dtype=np.float32)]


def shifted(by: float, only_first: bool = False) -> list[np.ndarray]:
    rows = [row.copy() for row in LOGPROBS]
    for row in rows[: 1 if only_first else None]:
        row[0] += by
    return rows


def test_equal_log_probabilities_agree():
    found = agree(LOGPROBS, LOGPROBS, SECTION)
    assert (found.mean, found.largest) == (0.0, 0.0)


@pytest.mark.parametrize("engine", [shifted(0.002), shifted(0.006, only_first=True), shifted(float("nan"))])
def test_a_difference_beyond_a_limit_fails_the_stage(engine):
    with pytest.raises(SyncMismatch, match="disagree"):
        agree(engine, LOGPROBS, SECTION)


def test_differences_within_the_limits_are_reported():
    found = agree(shifted(0.001, only_first=True), LOGPROBS, SECTION)
    assert found.largest == pytest.approx(0.001, rel=1e-3)
    assert found.mean == pytest.approx(0.001 / 3, rel=1e-3)
