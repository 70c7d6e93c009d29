"""`ratchet ...` and `python -m flows ...`."""

import sys

from flows.cli import execute
from tasks.settings import prepare_process


def main() -> None:
    """Carry out the command line of this process and end it with the command's exit code."""
    prepare_process()  # before anything imports Prefect or Ray
    sys.exit(execute())


if __name__ == "__main__":
    main()
