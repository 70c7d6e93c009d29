"""Countable costs of the workflow beyond the work; `ratchet bench overhead` measures the rest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flows.views.history import read_history
from flows.views.status import SHORT, read_status
from infra.bench import overhead
from storage import layout
from storage.backends.root import open_root
from tasks.stages.names import Stage
from tests.flows.runs import MakeRun
from tests.storage.counting import counting

LONG = 1010  # more iterations than one request lists


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    overhead.make_long_run(folder, LONG)
    return folder


@pytest.mark.slow
def test_a_status_takes_few_requests_however_long_the_run_is(long: Path):
    further = 6 * (overhead.LONG - LONG) / 1000  # pages of the listings: an iteration and its five manifests
    assert overhead.status_requests(long) + further <= 70


@pytest.mark.slow
def test_the_end_of_an_iteration_takes_few_requests(tmp_path: Path):
    end, whole = overhead.s3_requests(tmp_path, iterations=2)
    assert 0 < end <= 15
    assert whole > end


def test_the_status_of_a_long_run_reads_some_of_it_and_says_what_all_of_it_says(tmp_path: Path):
    overhead.make_long_run(tmp_path, 5 * SHORT)
    root = counting(open_root(str(tmp_path)))
    short = read_status(root, "long")
    assert sum(key.startswith("read long/manifests") for key in root.asked) < 40
    whole = read_status(root, "long", whole=True)
    assert len(whole.history) == 5 * SHORT + 1
    assert short.history == whole.history[-len(short.history) :]
    changing = {"history", "seconds_per_iteration", "warnings"}
    assert short.model_dump(exclude=changing) == whole.model_dump(exclude=changing)


@pytest.mark.slow
@pytest.mark.parametrize("begun", [(), (Stage.ROLLOUT,), (Stage.ROLLOUT, Stage.REWARD, Stage.TRAIN, Stage.WEIGHT_SYNC)])
def test_a_long_run_in_work_continues_where_all_of_it_says(make_run: MakeRun, root, begun):
    make_run("a", SHORT + 5, begun, unevaluated=(SHORT + 4,))
    short, whole = read_status(root, "a"), read_status(root, "a", whole=True)
    assert len(short.history) < len(whole.history)
    chosen = {"iterations", "current", "complete", "stages", "changes"}
    assert short.model_dump(include=chosen) == whole.model_dump(include=chosen)
    assert short.history == tuple(read_history(root, "a")[-len(short.history) :])


def test_newest_iterations_that_are_only_sampled_are_found(make_run: MakeRun, root):
    make_run("a", SHORT + 5)
    for iteration in (SHORT + 3, SHORT + 4, SHORT + 5):
        for stage in (Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE):
            root.remove(layout.manifest_key("a", iteration, stage, 0))
    assert read_status(root, "a").current == SHORT + 3 == read_status(root, "a", whole=True).current


@pytest.mark.full
def test_the_bench_prints_what_it_has_measured():
    command = [sys.executable, "-m", "flows", "bench", "overhead", "--json", "--iterations=2", "--repeats=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found = overhead.Overhead.model_validate(json.loads(done.stdout.splitlines()[-1]))
    assert found.status_5000_s3_requests <= 70
    assert found.s3_requests_per_iteration <= 15
    assert found.cpu_s_per_iteration_direct > 0
    assert found.database_mib_per_1000_iterations > 0
