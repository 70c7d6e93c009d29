"""The files for a team's servers name only what exists, keep secrets out and listen on this machine alone.

None of them is run here.
"""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.settings import Settings
from prefect.settings.legacy import _get_settings_fields

from flows.cli.app import app
from flows.site.entries import read_deployments
from tasks.config.code_version import PROJECT_ROOT
from tasks.config.environment import HEARTBEAT_S
from tests.forked_python import forked_python

SITE = PROJECT_ROOT / "infra" / "site"
PROJECT = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text())["project"]
HOME = "/opt/ratchet"
DOCKERFILE = (SITE / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((SITE / "compose.yaml").read_text())
RAY: dict[str, Any] = yaml.safe_load((SITE / "ray.yaml").read_text())
KUBERNETES: dict[str, Any] = json.loads((SITE / "kubernetes.json").read_text())
UNIT = (SITE / "ratchet.service").read_text()
SECRET = re.compile(r"PASSWORD|AUTH_STRING|SECRET_ACCESS_KEY|ACCESS_KEY_ID|CONNECTION_URL")


@pytest.mark.parametrize("file", [one for one in sorted(SITE.iterdir()) if one.suffix != ".dockerignore"], ids=str)
def test_each_file_says_that_it_is_not_run(file: Path):
    assert "NOT RUN" in file.read_text()


def ratchet(words: list[str]) -> None:
    """Parse a command line of ours without executing it."""
    app.parse_args(words, exit_on_error=False, print_error=False)


def prefect_help(words: list[str], python: str) -> str:
    """Help text of a Prefect command; proves that the command exists."""
    verbs = [word for word in words if not word.startswith("-")]
    command = [python, "-c", "import runpy; runpy.run_module('prefect', run_name='__main__')", *verbs, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_image_is_made_of_what_is_there():
    (base,) = re.findall(r"^FROM (\S+)$", DOCKERFILE, re.MULTILINE)
    assert base.startswith("python:3.12-")
    assert PROJECT["requires-python"] == ">=3.12,<3.13"
    copied = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]
    assert all(words[0] == "--chown=ratchet:ratchet" for words in copied)  # a later `chown` would store all of it twice
    for name in (name for _, *names in copied for name in names):
        assert (PROJECT_ROOT / name).exists(), name
        assert f"!{name}" in (SITE / "Dockerfile.dockerignore").read_text().splitlines(), name
    (variant,) = re.findall(r"^ARG VARIANT=(\w+)$", DOCKERFILE, re.MULTILINE)
    assert (PROJECT_ROOT / "infra" / "requirements" / f"{variant}.txt").exists()
    assert "infra/setup.sh" in DOCKERFILE
    (user,) = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    assert user != "root"
    assert f"WORKDIR {HOME}" in DOCKERFILE
    assert f"ENV PATH={HOME}/.venv/bin:$PATH" in DOCKERFILE
    for named in PROJECT["license-files"], [PROJECT["readme"]]:
        assert all(name in DOCKERFILE for name in named)


def test_what_the_image_adds_is_for_the_pinned_prefect():
    pinned = next(one for one in PROJECT["optional-dependencies"]["trainer"] if one.startswith("prefect=="))
    assert f"the newest for Prefect {pinned.removeprefix('prefect==')}" in DOCKERFILE


OURS = {name: one for name, one in COMPOSE["services"].items() if one["image"] == "ratchet"}


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_the_commands_of_the_containers_exist(name: str, tmp_path_factory: pytest.TempPathFactory):
    program, *words = OURS[name]["command"]
    if program == "ratchet":
        ratchet(words)
        assert all((PROJECT_ROOT / word).exists() for word in words if "/" in word)
    elif program == "prefect":
        verbs = words[: next((n for n, word in enumerate(words) if word.startswith("-")), len(words))]
        said = prefect_help(verbs, forked_python(tmp_path_factory, "command"))
        assert all(word in said for word in words if word.startswith("--")), words
    else:
        assert program == "python"
        assert importlib.util.find_spec(words[1]) if words[0] == "-m" else compile(words[-1], name, "exec")


def test_the_containers_refer_to_each_other():
    services, volumes = COMPOSE["services"], set(COMPOSE["volumes"])
    for name, one in services.items():
        for other, condition in one.get("depends_on", {}).items():
            assert other in services, name
            healthy = condition["condition"] == "service_healthy"
            assert not healthy or "healthcheck" in services[other], (name, other)
            ends = condition["condition"] == "service_completed_successfully"
            assert not ends or services[other].get("restart") in ("no", "on-failure"), (name, other)
        assert {place.partition(":")[0] for place in one.get("volumes", ())} <= volumes
        for value in one.get("environment", {}).values():
            for host in re.findall(r"(?:://|@)([a-z]+):\d+", value):
                assert host in services, (name, value)
    assert services["worker"]["command"] == ["python", "-m", "flows.site.worker"]
    assert COMPOSE["x-ratchet"]["build"]["dockerfile"] == "infra/site/Dockerfile"
    assert (SITE / COMPOSE["x-ratchet"]["build"]["context"] / "pyproject.toml").resolve().exists()


def test_nothing_is_published_beyond_this_machine_and_no_secret_is_written_down():
    for name, one in COMPOSE["services"].items():
        for port in one.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name
        for key, value in one.get("environment", {}).items():
            if SECRET.search(key):
                assert re.search(r"\$\{RATCHET_[A-Z0-9_]+:\?[^}]+\}", value), key
    for key, value in {
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    }.items():
        assert COMPOSE["x-server"][key] == value


def test_the_settings_of_the_containers_are_settings_of_prefect():
    known = _get_settings_fields(Settings)
    used = {key for one in (COMPOSE["x-server"], COMPOSE["x-client"]) for key in one if key.startswith("PREFECT_")}
    ours = {key for key in used if not key.startswith("PREFECT_REDIS_")}  # those are of prefect-redis
    assert ours <= set(known)
    assert COMPOSE["x-client"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_S)


@pytest.mark.slow
def test_ray_accepts_its_cluster():
    util = importlib.import_module("ray.autoscaler._private.util")
    util.validate_config(RAY)
    starting = RAY["head_start_ray_commands"][-1]
    assert "RAY_AUTH_MODE=token" in starting
    options = re.findall(r"--[a-z-]+", starting)
    program = Path(sys.executable).with_name("ray")
    said = subprocess.run([program, "start", "--help"], capture_output=True, text=True, check=True).stdout
    assert all(option in said for option in options)
    assert RAY["max_workers"] == 0  # flow, trainer and engines share one host


def test_a_job_of_the_work_pool_is_one_container_without_rights():
    job = KUBERNETES["job_configuration"]["job_manifest"]
    pod = job["spec"]["template"]["spec"]
    # requirements of prefect-kubernetes on a manifest
    assert (job["apiVersion"], job["kind"], job["metadata"]["namespace"]) == ("batch/v1", "Job", "{{ namespace }}")
    assert (pod["parallelism"], pod["completions"], pod["restartPolicy"]) == (1, 1, "Never")
    (container,) = pod["containers"]
    assert (container["name"], container["args"], container["env"]) == ("prefect-job", "{{ command }}", "{{ env }}")
    assert job["spec"]["backoffLimit"] == 0  # Prefect tries again, and the run's lease decides
    assert pod["terminationGracePeriodSeconds"] > 90  # an interrupted command ends within this time
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    variables = KUBERNETES["variables"]["properties"]
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(KUBERNETES["job_configuration"])))
    assert used == set(variables)
    assert variables["working_dir"]["default"] == HOME
    assert "default" not in variables["command"]


def test_the_worker_in_a_cluster_has_the_rights_of_its_jobs_and_no_others():
    found = {one["kind"]: one for one in yaml.safe_load_all((SITE / "kubernetes-worker.yaml").read_text())}
    variables = KUBERNETES["variables"]["properties"]
    assert found["Namespace"]["metadata"]["name"] == variables["namespace"]["default"]
    others = [one["metadata"]["namespace"] for kind, one in found.items() if kind != "Namespace"]
    assert set(others) == {variables["namespace"]["default"]}
    name = found["ServiceAccount"]["metadata"]["name"]
    (subject,) = found["RoleBinding"]["subjects"]
    assert (subject["name"], found["RoleBinding"]["roleRef"]["name"]) == (name, found["Role"]["metadata"]["name"])
    changed = {
        resource
        for rule in found["Role"]["rules"]
        if not {"create", "update", "patch", "delete"}.isdisjoint(rule["verbs"])
        for resource in rule["resources"]
    }
    assert changed == {"jobs"}
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    assert pod["serviceAccountName"] == name
    assert container["image"] == variables["image"]["default"]
    assert container["envFrom"] == [{"secretRef": {"name": variables["secret"]["default"]}}]
    assert container["command"] == ["python", "-m", "flows.site.worker", "kubernetes"]
    claim = found["PersistentVolumeClaim"]["metadata"]["name"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"]]


def unit_settings() -> dict[str, str]:
    return dict(line.split("=", 1) for line in UNIT.splitlines() if "=" in line and not line.startswith("#"))


def test_the_unit_starts_and_ends_a_site():
    settings = unit_settings()
    program, *words = shlex.split(settings["ExecStart"])
    assert program == f"{HOME}/.venv/bin/ratchet"
    assert words[:2] == ["up", "--stay"]
    ratchet(words)
    assert settings["User"] not in ("", "root")
    assert settings["WorkingDirectory"] == HOME
    assert (settings["Type"], settings["Restart"], settings["KillMode"]) == ("exec", "always", "mixed")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path):
    here = UNIT.replace(f"{HOME}/.venv/bin/ratchet", "/bin/true").replace(f"={HOME}", "=/")
    (tmp_path / "ratchet.service").write_text(here)
    command = ["systemd-analyze", "verify", str(tmp_path / "ratchet.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "ratchet.service" in done.stderr) == (0, False), done.stderr
    (tmp_path / "ratchet.service").write_text(here.replace("UMask", "UMsk"))
    assert "UMsk" in subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_the_deployments_can_be_registered():
    assert {flow.name for _, flow in read_deployments(PROJECT_ROOT / "infra" / "prefect.yaml")} >= {"train", "maintain"}
