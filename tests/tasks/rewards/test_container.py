"""Programs of the policy in containers: they end as under bubblewrap, and a container that cannot be had is refused."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from storage.errors import InputError
from tasks.config.reward import RewardSection
from tasks.rewards.code import check_programs, code_tests
from tasks.rewards.sandbox import SandboxFailed, check_image, run_in_container
from tasks.rewards.trying import check_reward
from tests.tasks.rewards.test_sandbox import HOSTILE, LIMITS, SAYS_WHERE, SCORES, still_there

LEFT_OUT = {"__pycache__", "site-packages", "test"}
ID = "0123456789abcdef" * 4
STUB = """#!/bin/sh
echo "$@" >> {record}
[ "$1" = image ] && [ "$5" = known ] && echo {id} && exit 0
echo "Error: it does not start" >&2
exit 125
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Requests to a podman that knows one image and starts none."""
    command, record = tmp_path / "podman", tmp_path / "asked"
    command.write_text(STUB.format(record=record, id=ID))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return record


def test_without_podman_nothing_runs_and_the_start_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxFailed, match="podman is not installed"):
        code_tests({"tests": "assert True"}, "x = 1", image=ID)
    with pytest.raises(InputError, match=r"`apt-get install podman`, or leave image out"):
        check_reward(RewardSection(function="code_tests", arguments={"image": ID}, max_failures=0.25))


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("known", f"can be another image tomorrow: .*; image = '{ID}' here"),
        ("python:3.12", "`podman pull python:3.12` first"),
        (ID, "none starts: podman ended with code 125: Error: it does not start"),
    ],
)
def test_an_image_is_named_by_its_id_and_is_there(image: str, said: str):
    with pytest.raises(InputError, match=said):
        check_programs(image)


def test_a_container_has_no_network_no_rights_and_limits(asked: Path):
    with pytest.raises(SandboxFailed):
        run_in_container(ID, "print(1)", LIMITS)
    given = asked.read_text().split()
    assert {
        "--network=none", "--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--user=65534:65534",
        "--security-opt=no-new-privileges", "--ipc=none", "--pull=never", "--memory=256m", "--memory-swap=256m",
        "--pids-limit=8", "--timeout=33",
    } <= set(given)  # fmt: skip
    assert len([one for one in given if one.startswith("--volume=")]) == 2
    assert not any(one.startswith(("--env", "--privileged", "--device", "--mount")) for one in given)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The id of an image with this Python and nothing else, which podman makes without a registry."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    base, python = Path(sys.base_prefix).resolve(), os.path.realpath(sys.executable)
    libraries = re.findall(r"/\S+", subprocess.run(["ldd", python], capture_output=True, text=True, check=True).stdout)
    packed = tmp_path_factory.mktemp("image") / "image.tar"
    with tarfile.open(packed, "w", dereference=True) as archive:
        for path in (python, *libraries, f"{base}/lib/python{sys.version_info.major}.{sys.version_info.minor}"):
            archive.add(path, filter=lambda one: None if LEFT_OUT & set(Path(one.name).parts) else one)
        link = tarfile.TarInfo("usr/bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, python
        archive.addfile(link)
    made = subprocess.run(["podman", "import", "--quiet", str(packed)], capture_output=True, text=True, check=True)
    return made.stdout.strip()


@pytest.mark.full
@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE)
def test_hostile_programs_fail_and_leave_nothing(
    image: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "1")
    (tmp_path / "secret").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = {"PORT": str(server.getsockname()[1]), "PARENT": str(os.getpid()), "FOLDER": str(tmp_path)}
        for word, value in words.items():
            program = program.replace(word, value)
        ran = run_in_container(image, f"{SAYS_WHERE}\n{program}\nprint('reached')", LIMITS)
    assert ran.code != 0
    assert "reached" not in ran.output
    assert len(ran.output) + len(ran.errors) <= LIMITS.output_kb * 1024 * 2
    assert still_there(ran) == set()
    assert left() == []


@pytest.mark.full
@pytest.mark.parametrize(("response", "tests", "reward"), SCORES.values(), ids=SCORES)
def test_a_program_scores_by_its_tests(image: str, response: str, tests: object, reward: float):
    check_image(image)
    assert code_tests({"tests": tests}, response, seconds=60.0 if reward else 1.0, image=image) == reward


@pytest.mark.full
def test_a_container_whose_owner_was_killed_ends_by_itself(image: str):
    program = f"""
from tasks.rewards.sandbox import run_in_container
from tasks.rewards.sandbox import ProgramLimits
run_in_container({image!r}, "import time; time.sleep(600)", ProgramLimits(seconds=5))
"""
    owner = subprocess.Popen([sys.executable, "-c", program])
    until = time.monotonic() + 60
    while not left() and time.monotonic() < until:
        time.sleep(0.05)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert left()
    until = time.monotonic() + 120
    while left() and time.monotonic() < until:
        time.sleep(0.5)
    assert left() == []


def left() -> list[str]:
    """Names of containers of ours."""
    listed = ["podman", "ps", "--all", "--format={{.Names}}", "--filter=name=ratchet-"]
    return subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
