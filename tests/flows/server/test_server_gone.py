"""The Prefect server shows a run; a run does not need it."""

import os
import subprocess
from pathlib import Path

import pytest

from storage.backends.root import open_root
from storage.manifest import need
from tasks.stages.names import Stage
from tests.forked_python import forked_python
from tests.prefect_home import prepared
from tests.small.config import ITERATIONS

PROJECT = Path(__file__).resolve().parents[3]
GONE = "import runpy; runpy.run_module('tests.flows.server.gone', run_name='__main__')"


@pytest.mark.slow
def test_a_run_whose_server_dies_goes_on_to_its_end_and_says_so(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    environment = {
        **os.environ,
        "PREFECT_HOME": str(prepared(tmp_path / "prefect", tmp_path_factory)),
        "PREFECT_CLIENT_MAX_RETRIES": "0",  # the default is minutes of patience
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
    }
    done = subprocess.run(
        [forked_python(tmp_path_factory, "command"), "-c", GONE, str(tmp_path)],
        cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert "killed" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr
    assert "the page of this flow run lacks its artifacts" in done.stderr
    assert "The run is complete; the page of its flow run is not" in done.stderr
    assert need(open_root(str(tmp_path / "runs")), "a", ITERATIONS, Stage.WEIGHT_SYNC)
