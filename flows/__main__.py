"""`ratchet ...` and `python -m flows ...`."""

import os
import sys

from flows.cli.app import execute
from tasks.config.environment import prepare_process


def main() -> None:
    """Carry out the command line of this process and end it with the command's exit code."""
    prepare_process()  # before anything imports Prefect or Ray
    code = execute()
    sys.stdout.flush()
    sys.stderr.flush()
    # All that had to end has ended. What is left are threads: Prefect's would try for minutes to reach a server that is
    # gone, and a request to an engine that is gone would be waited for.
    os._exit(code)


if __name__ == "__main__":
    main()
