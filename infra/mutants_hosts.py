"""Faults in what a run on several hosts does that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_PLACES = ("tests/tasks/workers/test_placement.py",)

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
)
