"""Distribution of tests over several processes (`pytest -n auto`), and fixtures for all of them."""

import gc
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.measures import Measures
from trainer_core.collector import paused

# Tests of one group run in one process, in their order: they share what is expensive to start, or are long. A group is
# named by a folder, a file or a test; any other file is a group of its own. The longest come first, so that little is
# left at the end.
GROUPS = (
    "tests/trainer_core",
    "tests/flows/site",
    "tests/integration/test_loop.py",
    "tests/tasks/engine/vllm",
    "tests/integration/test_tutorial.py",
    "tests/faults",
    "tests/flows/site/test_postgres.py",
    "tests/tasks/workers/test_cluster.py",
    "tests/flows/server",
    "tests/integration/test_golden.py",
    "tests/storage/test_kill.py",
    "tests/bad_input",  # an interpreter that has imported the command line, for all of them
)
SHARES = {
    "tests/infra/bench/test_memory.py": "tests/trainer_core",  # processes forked from one with Megatron
    "tests/infra/bench/test_train.py": "tests/trainer_core",
    "tests/tasks/engine/vllm/test_replayed.py": "tests/trainer_core",
    "tests/tasks/export/test_adapters.py": "tests/trainer_core",
    "tests/tasks/export/test_critic.py": "tests/trainer_core",
    "tests/tasks/export/test_experts.py": "tests/trainer_core",
    "tests/tasks/export/test_export.py": "tests/trainer_core",
    "tests/tasks/export/test_reward_model.py": "tests/trainer_core",
    "tests/tasks/model_checks/test_obeyed.py": "tests/trainer_core",
    "tests/tasks/model_checks/test_registries.py": "tests/trainer_core",
    "tests/integration/test_faults.py": "tests/integration/test_loop.py",  # a whole run, as those that follow
    "tests/integration/test_retrain.py": "tests/integration/test_loop.py",
    "tests/integration/test_s3.py": "tests/integration/test_loop.py",
    "tests/tasks/workers/test_fleet.py": "tests/tasks/engine/vllm",  # engines too
    "tests/tasks/workers/test_standby.py": "tests/tasks/workers/test_actors.py",
    "tests/tasks/workers/test_survivors.py": "tests/tasks/workers/test_actors.py",
    "tests/tasks/workers/test_release.py": "tests/tasks/workers/test_cluster.py",
    "tests/flows/cli/test_launch.py": "tests/flows/server",  # a Prefect server, as those that follow
    "tests/flows/deployments/test_evaluate.py": "tests/flows/server",
    "tests/flows/deployments/test_flows.py": "tests/flows/server",
    "tests/flows/deployments/test_forms.py": "tests/flows/server",
    "tests/flows/deployments/test_maintain.py": "tests/flows/server",
    "tests/flows/site/test_elsewhere.py": "tests/flows/server",
    "tests/flows/site/test_notification.py": "tests/flows/server",
    "tests/flows/site/test_planned.py": "tests/flows/server",
    "tests/flows/site/test_reconciling.py": "tests/flows/server",
    "tests/flows/test_prefect_tasks.py": "tests/flows/server",
    "tests/flows/test_subflows.py": "tests/flows/server",
    "tests/flows/views/test_artifacts.py": "tests/flows/server",
    "tests/flows/views/test_page.py": "tests/flows/server",
}
OVER_ANY_BACKEND = ("tests/storage/ownership/", "tests/storage/upkeep/")
"""The quick tests run these on local files alone; tests/storage/backends covers the differences between backends."""
BYTES_OF_A_WORKER = 4 << 30  # an engine and two ranks at once
IN_MEMORY, BYTES_IN_MEMORY = Path("/dev/shm"), 4 << 30
"""Folder in memory for the files of the quick tests, if it has so much room: a disk is slow at the flushes of small
runs."""


def group_of(nodeid: str) -> str:
    """The group of a test: the most specific that is named, or its file."""
    file = nodeid.partition("::")[0]
    named = [group for group in GROUPS if nodeid == group or nodeid.startswith((f"{group}/", f"{group}::"))]
    return SHARES.get(file) or max(named, key=len, default=file)


def _parameter(item: pytest.Item, name: str) -> object:
    return item.callspec.params.get(name) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Three processes for two cores, as memory allows: tests wait for each other's processes, servers and schedules.

    None if a file or a single test is asked for.
    """
    if any(".py" in argument for argument in config.args):
        return 0
    memory = psutil.virtual_memory().total // BYTES_OF_A_WORKER
    return int(max(1, min(3 * len(os.sched_getaffinity(0)) // 2, memory)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give whole groups to the processes."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # in the order of `pytest_collection_modifyitems`, not by size
    return Groups(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[object]) -> None:
    from tests.forked_workers import fork

    fork(specs, [Path(argument.partition("::")[0]) for argument in config.args])


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" in config.option.markexpr and _room_in_memory() >= BYTES_IN_MEMORY:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Measures())


def _room_in_memory() -> int:
    if not os.access(IN_MEMORY, os.W_OK):
        return 0
    return min(psutil.disk_usage(str(IN_MEMORY)).free, psutil.virtual_memory().available)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without collecting garbage, and exclude what they import from later collections."""
    with paused():
        yield
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(OVER_ANY_BACKEND) and _parameter(item, "any_root") == "s3":
            item.add_marker(pytest.mark.slow)
    groups = dict.fromkeys((*GROUPS, *(group_of(item.nodeid) for item in items)))
    places = {group: place for place, group in enumerate(groups)}
    items.sort(key=lambda item: places[group_of(item.nodeid)])


_ENDS = pytest.StashKey[ExitStack]()


@pytest.fixture(scope="session")
def group_end(request: pytest.FixtureRequest) -> ExitStack:
    """Work after the last test of a group: a server without work takes a tenth of a core."""
    return request.session.stash.setdefault(_ENDS, ExitStack())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if _ENDS in item.session.stash and nextitem and group_of(item.nodeid) != group_of(nextitem.nodeid):
        item.session.stash[_ENDS].close()


@pytest.fixture(scope="module")
def default_signals():
    """Let the signals that end a command do so for these tests and for the processes that they start.

    A shell starts a background job with SIGINT ignored, and nohup does so with SIGHUP; children inherit that.
    """
    ignored = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_IGN
    ]
    for number in ignored:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
