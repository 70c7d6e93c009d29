"""`ratchet ...` and `python -m flows ...`."""

import os
import sys

from flows.cli.app import execute
from tasks.config.environment import prepare_process


def main() -> None:
    prepare_process()  # before anything imports Prefect or Ray
    code = execute()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything that must end has ended. Only threads are left: Prefect's would try for minutes to reach a server that
    # is gone, and a request to an engine that is gone would keep the process waiting.
    os._exit(code)


if __name__ == "__main__":
    main()
