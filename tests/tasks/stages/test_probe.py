"""Engine and trainer must compute the same on the probe; after a mismatch no engine samples any more."""

import numpy as np
import pytest

from storage.backends.root import open_root
from storage.errors import SyncMismatch
from storage.manifest import find, need
from tasks.stages.names import Stage
from tasks.stages.weight_sync import Difference, agree, limits
from tests.small.config import small_config
from tests.small.driving import RUN, driver
from tests.small.here import WorkersHere
from tests.small.workers import SmallEngine

LIMITS = Difference(mean=1e-3, largest=5e-3)
LOGPROBS = [np.array([-0.5, -2.0], dtype=np.float32), np.array([-1.0], dtype=np.float32)]


def shifted(by: float, only_first: bool = False) -> list[np.ndarray]:
    rows = [row.copy() for row in LOGPROBS]
    for row in rows[: 1 if only_first else None]:
        row[0] += by
    return rows


def test_equal_log_probabilities_agree():
    found = agree(LOGPROBS, LOGPROBS, LIMITS)
    assert (found.mean, found.largest) == (0.0, 0.0)


@pytest.mark.parametrize("engine", [shifted(0.002), shifted(0.006, only_first=True), shifted(float("nan"))])
def test_a_difference_beyond_a_limit_fails_the_stage(engine):
    with pytest.raises(SyncMismatch, match="disagree"):
        agree(engine, LOGPROBS, LIMITS)


def test_differences_within_the_limits_are_reported():
    found = agree(shifted(0.001, only_first=True), LOGPROBS, LIMITS)
    assert found.largest == pytest.approx(0.001, rel=1e-3)
    assert found.mean == pytest.approx(0.001 / 3, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], Difference(1e-3, 5e-3)),
        (["engine.precision=bf16"], Difference(3e-2, 1e-1)),
        (["train.precision=bf16"], Difference(3e-2, 1e-1)),
        (["engine.precision=bf16", "sync.max_difference=0.3"], Difference(3e-2, 3e-1)),
        (["engine.precision=bf16", "engine.quantization=fp8"], Difference(0.2, 1.4)),
        (["engine.precision=bf16", "train.precision=bf16", "train.fp8=tensorwise"], Difference(0.2, 1.4)),
        (["sync.max_mean_difference=1e-4"], Difference(1e-4, 5e-3)),
    ],
)
def test_the_limits_are_those_of_the_coarser_precision_unless_they_are_given(settings, expected):
    assert limits(small_config(settings)) == expected


class Astray(SmallEngine):
    """Scores with other weights than it holds, until it is `cured`."""

    cured = False

    def score(self, sequences):
        found = super().score(sequences)
        return found if self.cured or self._version != 1 else [row - 1 for row in found]


class Stale(SmallEngine):
    """Scores as at the first sync, until it is `cured`."""

    cured, first = False, None

    def score(self, sequences):
        found = super().score(sequences)
        if self._version is not None and self.first is None:
            self.first = found
        return found if self.cured else self.first or found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "message"), [(Astray, "disagree on the probe"), (Stale, "disagree|old weights")])
def test_after_a_failed_probe_nothing_is_sampled_until_the_next_sync(kind, message, tmp_path):
    root = open_root(str(tmp_path / "root"))
    config = small_config(["run.iterations=1", "evaluate.every=0", "engine.count=2"])
    made = []
    workers = WorkersHere(config, engine=lambda directory: made.append(kind(directory)) or made[-1])
    with pytest.raises(SyncMismatch, match=message):
        driver(root, config, tmp_path / "first", workers=workers).drive()
    assert find(root, RUN, 1, Stage.WEIGHT_SYNC) is None
    for engine in made:
        assert engine.identity().weight_version is None
        with pytest.raises(SyncMismatch, match=message):
            engine.generate([[5]], [0], None)
        engine.cured = True
    driver(root, config, tmp_path / "second", workers=workers).drive()
    assert {engine.identity().weight_version for engine in made} == {1}
    assert need(root, RUN, 1, Stage.WEIGHT_SYNC).metrics["probe_diff_max"] == 0
