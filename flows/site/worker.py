"""The worker of a site, Prefect's own: `python -m flows.site.worker [TYPE]`, of the type `process` if none is given.

It also looks after flow runs that have crashed, and after its own that have lost their process."""

import logging
import runpy
import sys
import threading
import time
from typing import Any
from uuid import UUID

import httpx
import psutil
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException
from prefect.runner import Runner

from flows.site.reconciling import reconcile
from flows.site.registration import POOL
from tasks.config.environment import FLOW_RUN, is_of_a_site

logger = logging.getLogger(__name__)

_LOOK_S = 5.0
_PROCESS = "process"
_QUIET = ("prefect.flow_runs.worker", "prefect.flow_runs.runner")  # loggers of a worker in the log of a flow run


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) > 1 else _PROCESS
    for name in _QUIET:
        logging.getLogger(name).addFilter(is_warning)  # the log of a flow run begins with what it will do
    alone = kind == _PROCESS and is_of_a_site()  # else others of the pool have processes of their own
    forget_cancels()
    threading.Thread(target=_look_after, args=(alone,), daemon=True).start()
    sys.argv = ["prefect", "worker", "start", "--pool", POOL, "--type", kind]
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)


def forget_cancels() -> None:
    """Let a flow run that was cancelled and retried be cancelled again: Prefect's runner ignores the second Cancel of
    one flow run, which then goes on to its end."""
    execute = Runner.execute_flow_run

    async def executed(self: Runner, flow_run_id: UUID, *given: Any, **more: Any) -> Any:
        self._cancelling_flow_run_ids.discard(flow_run_id)  # pyright: ignore[reportPrivateUsage]
        return await execute(self, flow_run_id, *given, **more)

    Runner.execute_flow_run = executed


def is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


def flow_runs_here() -> set[str]:
    found = set()
    for child in psutil.Process().children():
        try:
            found.add(child.environ().get(FLOW_RUN, ""))
        except psutil.Error:  # it has just ended
            continue
    return found


def _look_after(alone: bool) -> None:
    """Reconcile again and again; a server that is away is asked again later."""
    while True:
        time.sleep(_LOOK_S)
        try:
            with get_client(sync_client=True) as client:
                for name in reconcile(client, POOL, flow_runs_here() if alone else None):
                    logger.warning("flow run %s has lost its process and continues", name)
        except (httpx.HTTPError, PrefectException, OSError) as error:
            logger.warning("flow runs are not looked after at the moment: %s", error)


if __name__ == "__main__":
    main()
