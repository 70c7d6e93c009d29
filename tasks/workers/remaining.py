"""Processes that a run has on a cluster, for commands other than its own."""

from tasks.config.run import RunConfig
from tasks.workers.actors import ObservedGroup, WorkerGroup, find_groups, label_of, short_name
from tasks.workers.cluster import Cluster
from tasks.workers.hosts import give_up
from tasks.workers.interface import EngineHandle
from tasks.workers.meeting import forget
from tasks.workers.standby import waiting_label


def release(run: str, cluster: Cluster) -> int:
    """End all processes that a run has left on a cluster, with what Ray keeps for them and their folders, and return
    their number. Raises InputError, WorkerLost: the cluster does not answer."""
    cluster.check_alive()
    cluster.start()
    groups = find_groups(run)
    for name, actors in groups.items():
        WorkerGroup.found(name, [name] * len(actors), actors).end()
    forget(run)
    give_up(run)
    return sum(map(len, groups.values()))


def engines_on(run: str, config: RunConfig, cluster: Cluster) -> dict[str, EngineHandle]:
    """The engines that a run has on a cluster now, by name: `engine-0`. None is started or ended, also if it does not
    answer. Raises InputError, WorkerLost: the cluster does not answer."""
    cluster.check_alive()
    cluster.start()
    found: dict[str, EngineHandle] = {}
    for name, actors in sorted(find_groups(run).items()):
        role = short_name(name + "/0")
        if role == waiting_label("engine"):  # or has waited, and is called after its place now
            role = label_of(actors[0])
        group = ObservedGroup.found(name, [role] * len(actors), actors)
        if role.startswith("engine-") and group.alive():
            found[role] = EngineHandle.of(group, config.workers)
    return found
