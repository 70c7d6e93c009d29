"""Resources of a run on a cluster are released when it is complete, and by `ratchet stop`; other runs keep theirs, also
one of the same name below another root."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import ray

from tasks.config.environment import Settings
from tasks.workers.actors import find_groups, fresh_names, group_name, spawn
from tasks.workers.cluster import Cluster
from tasks.workers.folders import claim
from tasks.workers.kept_by_ray import RayStore
from tasks.workers.meeting import left

BLOCK = """
import sys
from tasks.config.environment import Settings
from tasks.workers.cluster import Cluster
from tasks.workers.fleet import Fleet
from tasks.workers.fleet import release
from tests.small.config import small_config
cluster = Cluster(Settings.from_environment())
assert not cluster.local
if sys.argv[1] == "stop":
    print(release(sys.argv[2], cluster))
    raise SystemExit
with Fleet(sys.argv[2], small_config(), cluster):
    cluster.start()
    if sys.argv[1] == "fail":
        raise KeyboardInterrupt
"""

RUN, OTHER = claim("file:///a", "run"), claim("file:///b", "run")


@pytest.fixture
def cluster(forked):
    """A Ray that another process attaches to as to a cluster."""
    with Cluster(Settings(ray_address=None, gpus=())) as started:
        started.start()
        yield started


def leave(run: str, count: int) -> str:
    """Detached actors as the ranks of a run leave them, with what they have met in; returns the group's name."""
    names = fresh_names(f"{run}/trainers/1234", count)
    actors = spawn(names, [{}] * count, detached=True)
    ray.get([actor.where.remote() for actor in actors])
    meet = RayStore(group_name(names[0]), "ratchet-meeting", timedelta(seconds=5))
    meet.set("rank-0", "here")
    return group_name(names[0])


def carry_out(how: str) -> str:
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run([sys.executable, "-c", BLOCK, how, RUN], env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == (how != "fail"), done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_that_ends_well_or_is_stopped_leaves_nothing_on_the_cluster(cluster):
    groups = [leave(run, count) for run, count in ((RUN, 2), (RUN, 1), (OTHER, 1))]
    carry_out("fail")
    assert len(find_groups(RUN)) == 2
    assert all(left(group) for group in groups)
    carry_out("succeed")
    assert find_groups(RUN) == {}
    assert [bool(left(group)) for group in groups] == [False, False, True]
    assert list(find_groups(OTHER)) == [groups[2]]
    leave(RUN, 3)
    assert carry_out("stop") == "3\n"
    assert find_groups(RUN) == {}
