"""The process environment. The only module that reads or writes it."""

import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
from pydantic import JsonValue

from storage.errors import InputError
from tasks.config.code_version import PROJECT_ROOT
from tasks.config.credentials import MASK, forms_of, has_credentials, is_secret, referenced, secret_texts, shown_text

if TYPE_CHECKING:
    from trainer_core.config import Device  # a host of environments would wait for it

_OFFLINE_AND_SILENT = {
    "HF_HUB_OFFLINE": "1",  # models are directories; a hub is never contacted
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive the forks of a data loader or of Ray
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}

_ORCHESTRATION = {
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",  # the default of 20 s is too short on two busy cores
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "RAY_worker_niceness": "0",  # actors are the run's own work; Ray would give everything else priority
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # actors reserve no GPU in Ray, yet must see the cards given to them
}

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}

_ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # `EngineSpec.own_core` decides; on CPU a 1 adds a process for the worker
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked process would share the actor's connections to Ray
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiled on first use, and not used for seeded requests
    "VLLM_USE_V2_MODEL_RUNNER": "1",  # vLLM's default differs between families
}

_ENGINE_ON_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # a few helpers compile even in eager mode: 12 s of start-up, and a compiler is needed
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # never pin: the machine is shared with the trainer
    "VLLM_MLA_DISABLE": "1",  # MLA has no CPU kernel; the multi-head form is the same mathematics
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second one's kernels are written in Triton, for cards
}

_DETERMINISTIC_ON_CUDA = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # a separate workspace per stream, as cuBLAS requires
    "NCCL_ALGO": "Ring",  # sums in one order
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine's attention
}

HEARTBEAT_S = 30  # seconds between heartbeats of the process of a flow run on a site: the least that Prefect allows

_SITE = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",  # SQLite has one writer; 10 s are too short on a busy machine
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_LEVEL": "INFO",  # what a flow run says is shown on its page
    "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,storage",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",  # a pickle would let whoever writes results run code
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",  # and what deleted flow runs leave
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": f"{HEARTBEAT_S}",
    "PREFECT__SERVER_FINAL": "1",
}

_FAULTS = "RATCHET_FAULTS"
_MEETING_PLACE = "RATCHET_ENGINE_MEETING_PLACE"
_LONGEST = 107 - len("/0187f9b6-95dc-41a2-b65c-9ee29a8a2eea")  # characters of a folder for Unix sockets of vLLM
_SITE_FOLDER = "RATCHET_SITE"
FLOW_RUN = "PREFECT__FLOW_RUN_ID"  # variable by which Prefect tells a process which flow run it does

_SCORING = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|TZ|TMPDIR|TEMP|TMP|VIRTUAL_ENV|CONDA_PREFIX|JAVA_HOME|CC|CXX"
    r"|SSL_CERT_(?:FILE|DIR)|(?:REQUESTS|CURL)_CA_BUNDLE|(?i:(?:HTTP|HTTPS|ALL|NO)_PROXY)"
    r"|TRANSFORMERS_OFFLINE|TOKENIZERS_PARALLELISM|DO_NOT_TRACK"
    r"|(?:LC|LD|XDG|OMP|MKL|OPENBLAS|CUDA|NVIDIA|HIP|ROCR|HF|TORCH)_\w+|PYTHON\w*"
)
"""Variables that a scoring process is given, unless they hold a secret."""
_NO_PROXY = ("localhost", "127.0.0.1", "::1")
"""Hosts that are reached without a proxy: our own servers, and the processes of this host."""
_resolved: set[str] = set()
"""Values of the secrets that this process has looked up, to keep them out of what it shows and stores."""


@dataclass(frozen=True)
class Settings:
    """The environment's settings for the machine and the cluster."""

    ray_address: str | None  # `host:port` of a Ray cluster to attach to; None starts a local Ray
    gpus: tuple[str, ...]  # the cards this process may use, as CUDA_VISIBLE_DEVICES spells them
    faults: Path | None = None
    """Folder of `flows.proof.faults`: which process of the run is killed where; `ratchet prove-resume` sets it."""

    @classmethod
    def from_environment(cls) -> "Settings":
        return cls(
            ray_address=os.environ.get("RAY_ADDRESS") or None,
            gpus=_visible_gpus(),
            faults=Path(os.environ[_FAULTS]) if _FAULTS in os.environ else None,
        )

    @property
    def local(self) -> bool:
        """True if everything runs on this host, under our own Ray."""
        return self.ray_address is None

    def device(self, kind: "Device | Literal['auto']") -> "Device":
        """Device to compute on; `auto` is CUDA if a card is visible. Raises InputError: none is, for CUDA; or for
        `auto` on a cluster, whose hosts may have some."""
        if kind == "auto" and not (self.gpus or self.local):
            raise InputError(
                'device.kind is "auto", and this host, which has no GPU, cannot see what the hosts of the Ray cluster '
                'at RAY_ADDRESS have: set device.kind to "cuda" or "cpu"'
            )
        if kind == "cuda" and self.local and not self.gpus:
            raise InputError('device.kind is "cuda", but no GPU is visible; use "auto" or "cpu"')
        if kind == "auto":
            return "cuda" if self.gpus else "cpu"
        return kind


def prepare_process(offline: bool = True) -> None:
    """Give this process and its children the defaults they need, but keep the user's values. Call it before Prefect or
    Ray is imported. They, and their processes, use a proxy for other hosts only. With `offline` this process contacts
    no hub, which a notebook may want to until a run starts."""
    for name, value in {**_OFFLINE_AND_SILENT, **_ORCHESTRATION}.items():
        if offline or not name.endswith("_OFFLINE"):
            os.environ.setdefault(name, value)
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if given.strip() != "*":
        hosts = [host.strip() for host in given.split(",") if host.strip()]
        exceptions = ",".join(dict.fromkeys((*hosts, *_NO_PROXY)))
        os.environ.update(no_proxy=exceptions, NO_PROXY=exceptions)  # libraries read one or the other


def prefect_home() -> Path:
    """The folder in which Prefect keeps its settings and the database of a temporary server."""
    return Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()


def resolve(value: JsonValue, place: str) -> JsonValue:
    """A value of the configuration, whose key is `place`, with each `env:NAME` in it replaced by that variable. Use it,
    never store it. Raises InputError: a variable is not set, or is empty."""
    if isinstance(value, dict):
        return {key: resolve(inner, f"{place}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [resolve(inner, f"{place}[{number}]") for number, inner in enumerate(value)]
    if (variable := referenced(value)) is None:
        return value
    if not (found := os.environ.get(variable)):
        raise InputError(f"{place} is env:{variable}, but {variable} is not set: export it before starting")
    _resolved.add(found)
    return found


def without_secrets(text: str) -> str:
    """A text without the secrets that this process has looked up, without every value of its environment that looks
    like one (`secret_texts`), and without the credentials of URLs."""
    if not text:
        return text
    others = [(name, value) for name, value in os.environ.items() if not _for_scoring(name, value)]
    known = {form for name, value in others for form in secret_texts(name, value)}
    known |= {form for secret in _resolved for form in forms_of(secret)}
    for secret in sorted(known, key=len, reverse=True):  # one may contain another
        text = text.replace(secret, MASK)
    return shown_text(text)


def ensure_ray_token() -> None:
    """Set a new token for a Ray that is started here, unless the user set one. Ray switches token authentication on for
    a Ray it starts, unless RAY_AUTH_MODE says otherwise. Without a token in the environment it would store one
    permanently in the home directory."""
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def without_ray_token() -> dict[str, str]:
    """The whole environment for a process that asks a Ray without a token."""
    named = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    return {**named, "RAY_AUTH_MODE": "disabled"}


def chooses_ray_authentication() -> bool:
    """True if the user has said whether a Ray asks for a token."""
    return "RAY_AUTH_MODE" in os.environ


def engine_environment(device: "Device", gpus: tuple[str, ...], local: bool) -> dict[str, str]:
    """Variables that an engine's process needs beyond those it inherits; `gpus` are the only cards it sees."""
    specific = _ENGINE_ON_CPU if device == "cpu" else {}
    # all processes of an engine are on one host
    return {**_compute_environment(device, local=True), **_ENGINE, **specific, **_cards(device, gpus, local)}


def host_environment() -> dict[str, str]:
    """Variables that a task on another host of a cluster needs beyond those that it inherits there."""
    return {**_OFFLINE_AND_SILENT, "PYTHONPATH": _python_path()}


def use_interface_of(address: str) -> None:
    """Let the process groups of this process use the interface that has this address of the host, and no other. Raises
    InputError: none has it."""
    having = [name for name, given in psutil.net_if_addrs().items() if address in {one.address for one in given}]
    loopback = ["lo"] if address.startswith("127.") else []
    if not (found := having or loopback):
        raise InputError(f"no interface of this host has the address {address}: start Ray with --node-ip-address")
    os.environ.update(GLOO_SOCKET_IFNAME=found[0], NCCL_SOCKET_IFNAME=found[0])


def use_first_runner() -> None:
    """Let vLLM take its first model runner in this process: the second one's `PoolingRunner` knows no classifiers."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


def set_engine_meeting_place(folder: str) -> None:
    """Say where the processes meet that an engine in this process starts. vLLM's sockets are there too, if the path is
    short enough: vLLM removes none of a process that was killed."""
    os.environ[_MEETING_PLACE] = folder
    if len(folder) <= _LONGEST:
        os.environ["VLLM_RPC_BASE_PATH"] = folder


def engine_meeting_place() -> Path:
    """The folder where the processes of this engine meet. Raises InputError: none was given."""
    if _MEETING_PLACE not in os.environ:
        raise InputError("an engine of several processes needs a folder where they meet: give it a meeting place")
    return Path(os.environ[_MEETING_PLACE])


def trainer_environment(
    device: "Device", gpus: tuple[str, ...], local: bool, deterministic: bool = False
) -> dict[str, str]:
    """Variables that a trainer rank's process needs beyond the environment it inherits."""
    specific = _trainer_on_cuda(max(1, len(gpus)), deterministic) if device == "cuda" else {}
    return {**_compute_environment(device, local), **specific, **_cards(device, gpus, local)}


def child_python_path() -> dict[str, str]:
    """The whole environment for a plain child process that imports this project."""
    return {**os.environ, "PYTHONPATH": _python_path()}


def scoring_environment(variables: Iterable[str]) -> dict[str, str]:
    """The whole environment for a scoring process: what Python, libraries and a site need, and the variables that its
    arguments refer to. No other value of this environment is in it, and no other that looks like a secret."""
    plain = {name: value for name, value in child_python_path().items() if _for_scoring(name, value)}
    return {**plain, **{name: os.environ[name] for name in variables if name in os.environ}}


def site_mark(folder: Path) -> tuple[str, str]:
    """The variable, and its value, by which the processes of a site are recognised, also if nothing recorded them."""
    return _SITE_FOLDER, str(folder)


def is_of_a_site() -> bool:
    """True if this process belongs to a site, whose worker is the only one of its work pool."""
    return _SITE_FOLDER in os.environ


def site_environment(folder: Path, home: Path, api: str, auth: str, database: str | None = None) -> dict[str, str]:
    """The whole environment for the server and the worker of a site, which is also that of its flow runs: with
    Prefect's home folder, the URL of the server's API, the auth string that the server requires and its clients send,
    and the URL of the server's database, which by default is SQLite in `home`."""
    inherited = {name: value for name, value in child_python_path().items() if not name.startswith("PREFECT_")}
    own = {name: value for name, value in os.environ.items() if name.startswith("PREFECT_WORKER_")}
    return {
        **inherited,
        **own,
        **_OFFLINE_AND_SILENT,
        **_SITE,
        **dict([site_mark(folder)]),
        "PREFECT_HOME": str(home),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "storage"),  # which does not follow the home folder
        "PREFECT_API_URL": api,
        "PREFECT_API_AUTH_STRING": auth,
        "PREFECT_SERVER_API_AUTH_STRING": auth,
        **({} if database is None else {"PREFECT_SERVER_DATABASE_CONNECTION_URL": database}),
    }


def with_faults(folder: Path) -> dict[str, str]:
    """The whole environment for a `ratchet` process in which the faults of `folder` happen; its children inherit it."""
    return {**child_python_path(), _FAULTS: str(folder)}


def _for_scoring(name: str, value: str) -> bool:
    known = name == _SITE_FOLDER or _SCORING.fullmatch(name) is not None
    return known and not (is_secret(name) or has_credentials(value))


def _trainer_on_cuda(ranks: int, deterministic: bool) -> dict[str, str]:
    share = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron overlaps by launch order
        # the state passes through host memory when it is saved; Ray would limit an actor to one thread for that
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share)),
        **(_DETERMINISTIC_ON_CUDA if deterministic else {}),
    }


def _compute_environment(device: "Device", local: bool) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if device == "cpu" else {}
    return {**_OFFLINE_AND_SILENT, **(_LOOPBACK if local else {}), **threads, "PYTHONPATH": _python_path()}


def _cards(device: "Device", gpus: tuple[str, ...], local: bool) -> dict[str, str]:
    if device == "cuda" and not local:
        return {}  # Ray says which
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus) if device == "cuda" else ""}


def _python_path() -> str:
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join(dict.fromkeys([str(PROJECT_ROOT), *(str(Path(path).absolute()) for path in inherited)]))


def _visible_gpus() -> tuple[str, ...]:
    """Cards that CUDA would see, without importing torch."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(card.strip() for card in chosen.split(",") if card.strip() not in ("", "-1"))
    nodes = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    return tuple(str(index) for index in range(len(nodes)))
