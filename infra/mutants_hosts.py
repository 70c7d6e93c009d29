"""Faults in what a run on several hosts does that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_PLACES = ("tests/tasks/workers/test_placement.py",)
_SURVIVORS = ("tests/tasks/workers/test_survivors.py",)

HOSTS = (
    Mutant(
        "two-ranks-on-a-card",
        "where engines share the cards of a cluster, Ray may give two ranks one card",
        "tasks/workers/placement.py",
        "_OF_A_RANK = 0.6\n",
        "_OF_A_RANK = 0.5\n",
        _PLACES,
    ),
    Mutant(
        "tensor-group-over-hosts",
        "a tensor group of trainer ranks may be spread over hosts",
        "tasks/workers/placement.py",
        '{"trainers": [{resource: float(parallel.tensor)}] * groups}',
        '{"trainers": [{resource: 1.0}] * parallel.world_size}',
        _PLACES,
    ),
    Mutant(
        "shared-memory-between-hosts",
        "weights go through shared memory between processes on several hosts",
        "tasks/workers/placement.py",
        '        if wanted not in ("auto", "files"):\n',
        '        if wanted == "memory":\n            return "memory"\n        if wanted not in ("auto", "files"):\n',
        _PLACES,
    ),
    Mutant(
        "head-decides-for-its-cluster",
        "a flow on a host without cards trains a cluster's run on CPU, unsaid",
        "tasks/config/environment.py",
        'if kind == "auto" and not (self.gpus or self.local):',
        'if kind == "auto" and not (self.gpus or self.local or True):',
        _PLACES,
    ),
    Mutant(
        "survivors-ended",
        "ranks that outlive another one are ended with it",
        "tasks/workers/ranks.py",
        "super().end(spared if self.keeps else ())",
        "super().end()",
        _SURVIVORS,
    ),
    Mutant(
        "failed-ranks-kept",
        "ranks that failed by themselves are used again",
        "tasks/workers/actors.py",
        "return {*failures, *done} - died if died else set()",
        "return {*failures, *done} - died",
        _SURVIVORS,
    ),
    Mutant(
        "survivors-change-places",
        "a rank that has outlived another one does not get its own place again",
        "tasks/workers/ranks.py",
        "actors = [by_rank[rank] for rank in range(world_size)]",
        "actors = list(by_rank.values())",
        _SURVIVORS,
    ),
    Mutant(
        "survivor-in-its-old-groups",
        "a rank that has outlived another one stays in the groups of the dead",
        "trainer_core/model/mesh.py",
        "    if member := dist.is_initialized():\n        leave()\n    return member\n",
        "    return False\n",
        ("tests/trainer_core/test_again.py",),
    ),
    Mutant(
        "standby-of-another-host",
        "a process that waits on one host takes the place of a rank on another, whose files are not there",
        "tasks/workers/ranks.py",
        "(one for one in left if one[0] == host)",
        "(one for one in left)",
        _SURVIVORS,
    ),
    Mutant(
        "short-calls-are-stalls",
        "calls that come one after the other to the same place are taken for one that stands still",
        "tasks/workers/stalls.py",
        "seen = (call[0], *(",
        "seen = (0, *(",
        ("tests/tasks/workers/test_stalls.py",),
    ),
    Mutant(
        "stalls-without-a-stage",
        "a rank that waits for another does not say in which stage",
        "tasks/workers/actors.py",
        "actor.call.remote(current_stage(), method",
        'actor.call.remote("", method',
        _SURVIVORS,
    ),
    Mutant(
        "clocks-of-hosts-unlike",
        "a host whose clock is minutes behind is used",
        "tasks/workers/hosts.py",
        "apart = max(before.clock - there.clock, there.clock - after.clock)",
        "apart = there.clock - after.clock",
        ("tests/tasks/workers/test_unlike_hosts.py",),
    ),
)
