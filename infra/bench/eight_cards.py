"""One run on four or eight cards, in parts of at most nine minutes each; prints one JSON line per figure.

    python -m infra.bench.eight_cards [--cards N] [--small] [--part NAME] [--out FILE]

A part that is finished in FILE is not run again, nor is a layout that has its figures. With fewer cards than a part or
a layout needs, it is left out, and a line says so. `--small` runs each part at a small size: on CPU or two cards.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flows.proof.faults import Fault, FaultFolder
from infra.bench.card_memory import CardMemory
from infra.bench.cases import Case, draw_samples
from infra.bench.experts import ExpertModel, write_random
from infra.bench.latent import LatentModel
from infra.bench.loop import Layout, Timed, default_tables, measured, read_stages
from infra.bench.train import PEAK_FLOPS
from storage.errors import InputError, RatchetError, told
from storage.kill_points import Point
from tasks.config.document import completed
from tasks.config.environment import Settings, child_python_path, with_faults
from tasks.config.model import GeneratedModel
from tasks.config.run import RunConfig
from tasks.stages.names import Stage
from tasks.workers.cluster import Cluster
from tasks.workers.fleet import Fleet
from trainer_core.config import Frozen, ParallelConfig, Precision

PartName = Literal["layouts-qwen3-moe", "layouts-deepseek-v3", "colocated", "ahead", "killed-rank"]
LIMIT_S = 540.0
_STATE_BYTES = 32  # of a parameter on disk: two states of 14, the model and its copy in the run


class Size(Frozen):
    """Models and samples."""

    experts: ExpertModel
    """Qwen3-MoE; its layers are those of the layouts' part."""
    latent: LatentModel
    layers: int
    """Most layers of Qwen3-MoE in the loop."""
    precision: Precision
    prompts: int
    samples: int
    tokens: int
    """Most tokens of a response."""
    cache_mib: int
    cuda_graphs: bool = True


FULL = Size(
    experts=ExpertModel(layers=4, hidden=2048, expert=768, experts=128, chosen=8, heads=32, kv_heads=4, head_dim=128,
                        vocabulary=151_936),
    latent=LatentModel(layers=4, hidden=2048, intermediate=11264, expert=1408, experts=64, chosen=6, heads=16,
                       query_rank=1536, value_rank=512, plain=128, rotary=64, value=128, vocabulary=163_840),
    layers=8, precision="bf16", prompts=32, samples=16, tokens=4096, cache_mib=24 << 10,
)  # fmt: skip
"""Qwen3-30B-A3B and Moonlight-16B-A3B, with fewer layers: a state of all 48 layers has 430 GB."""
SMALL = Size(
    experts=ExpertModel(layers=4, hidden=256, expert=128, experts=8, chosen=2, heads=4, kv_heads=2, head_dim=64,
                        vocabulary=512),
    latent=LatentModel(layers=4, hidden=256, intermediate=512, expert=128, experts=8, chosen=2, heads=4, query_rank=96,
                       value_rank=128, plain=128, rotary=64, value=128, vocabulary=512),
    layers=4, precision="bf16", prompts=8, samples=8, tokens=128, cache_mib=512, cuda_graphs=False,
)  # fmt: skip
"""Shapes that cards have kernels for; on CPU in fp32."""
LAYOUTS: dict[str, ParallelConfig] = {
    "one card": ParallelConfig(),
    "tp2 pp2": ParallelConfig(tensor=2, sequence=True, pipeline=2),
    "tp2 dp2 ep4": ParallelConfig(tensor=2, sequence=True, data=2, expert=4, expert_tensor=1),
    "dp4 ep4": ParallelConfig(data=4, expert=4),
    "tp2 pp2 dp2": ParallelConfig(tensor=2, sequence=True, pipeline=2, data=2),
    "tp2 ep4": ParallelConfig(tensor=2, sequence=True, data=4, expert=4, expert_tensor=1),
    "pp2 vpp2 cp2 ep2": ParallelConfig(pipeline=2, virtual_pipeline=2, context=2, expert=2),
    "tp2 cp2 pp2": ParallelConfig(tensor=2, sequence=True, context=2, pipeline=2),
}
SMALL_LAYOUTS: dict[str, ParallelConfig] = {
    "one card": LAYOUTS["one card"],
    "tp2": ParallelConfig(tensor=2, sequence=True),
    "dp2 ep2": ParallelConfig(data=2, expert=2),
    "pp2 vpp2": ParallelConfig(pipeline=2, virtual_pipeline=2),
    "cp2 ep2": ParallelConfig(context=2, expert=2),
}
NEEDS: dict[PartName, int] = {
    "layouts-qwen3-moe": 2, "layouts-deepseek-v3": 2, "colocated": 2, "ahead": 2, "killed-rank": 2,
}  # fmt: skip
"""Cards without which a part is left out."""


@dataclass
class Report:
    """Lines of figures, on standard output and in a file, which may have some from before."""

    file: Path
    known: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.file.exists():
            self.known = [json.loads(line) for line in self.file.read_text().splitlines()]

    def line(self, **values: Any) -> None:
        """Write one line."""
        self.known.append(values)
        text = json.dumps(values)
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        with self.file.open("a") as file:
            file.write(f"{text}\n")

    def figures(self, part: str, case: str, values: Mapping[str, float]) -> None:
        """Write one line for each figure."""
        for name, value in values.items():
            self.line(part=part, case=case, figure=name, value=value)

    def of(self, part: str, case: str) -> dict[str, float]:
        """The figures of a case, from now or before."""
        return {one["figure"]: one["value"] for one in self.known
                if "figure" in one and (one["part"], one["case"]) == (part, case)}  # fmt: skip

    def done(self, part: str) -> bool:
        """True if a part was run to its end."""
        return any(one.get("part") == part and one.get("done") for one in self.known)


@dataclass(frozen=True)
class Order:
    """Request of the command line."""

    cards: int
    small: bool
    report: Report

    @property
    def size(self) -> Size:
        """Models and samples."""
        cpu = Settings.from_environment().device("auto") == "cpu"
        size = SMALL if self.small else FULL
        return size.model_copy(update={"precision": "fp32"}) if cpu else size


def layouts(order: Order, part: PartName, spec: ExpertModel | LatentModel) -> bool:
    """Loss, gradient norm and entropy of one update in each layout, from the same weights and samples. True if all of
    them have these."""
    size, failed = order.size, 0
    case = Case(model=GeneratedModel(vocabulary=spec.vocabulary), precision=size.precision, samples=16, prompt=8,
                response=size.tokens // 4, rows=2)  # fmt: skip
    samples = draw_samples(case, mixed=True)
    with tempfile.TemporaryDirectory(prefix="ratchet-cards-") as folder:
        write_random(Path(folder), spec)
        config = completed(tables(size, folder, case.length), [], None, part)
        for name, layout in chosen(order, part):
            if order.report.of(part, name):
                continue
            train = config.train.model_copy(update={"parallel": layout})
            try:
                found = updated(config.model_copy(update={"train": train}), folder, samples)
            except RatchetError as error:  # the others are still to be measured
                order.report.line(part=part, case=name, failed=told(error))
                failed += 1
            else:
                order.report.figures(part, name, found | apart(found, order.report.of(part, "one card")))
    return not failed


def chosen(order: Order, part: str) -> Iterator[tuple[str, ParallelConfig]]:
    """The layouts that fit on the cards; a line for each that does not."""
    for name, layout in (SMALL_LAYOUTS if order.small else LAYOUTS).items():
        if layout.world_size <= order.cards:
            yield name, layout
        else:
            reason = f"it needs {layout.world_size} cards, and there are {order.cards}"
            order.report.line(part=part, case=name, left_out=reason)


def updated(config: RunConfig, folder: str, samples: Any) -> dict[str, float]:
    """One update of new ranks."""
    with Fleet("cards", config, Cluster(Settings.from_environment())) as fleet:
        group = fleet.trainers(Path(folder), config.train)
        group.import_model()
        found = group.train_policy(samples, 1.0)
    return {name: found[name] for name in ("loss", "grad_norm", "entropy")}


def apart(found: Mapping[str, float], one: Mapping[str, float]) -> dict[str, float]:
    """The relative distance of each figure from that of one card."""
    return {f"{name}, relative to one card": abs(found[name] - one[name]) / max(abs(one[name]), 1e-12)
            for name in found if name in one}  # fmt: skip


def tables(size: Size, model: str, length: int) -> dict[str, Any]:
    """The configuration of the loop's bench, with this size's models and samples."""
    made = default_tables("tiny" if size.precision == "fp32" else "0.75b")
    vocabulary = size.experts.vocabulary
    made["model"] = {"source": model}
    made["rollout"] |= {"prompts": size.prompts, "samples": size.samples, "max_tokens": size.tokens,
                        "groups_per_part": max(1, size.prompts // 8),
                        "stop_tokens": list(range(vocabulary - vocabulary * 4 // size.tokens, vocabulary))}  # fmt: skip
    made["train"] |= {"max_length": length, "precision": size.precision, "micro_batch_size": 1}
    made["engine"] |= {
        "max_model_len": length,
        "precision": size.precision,
        "kv_cache_mib": size.cache_mib,
        "cuda_graphs": size.cuda_graphs,
    }
    return made


def loop(order: Order, part: PartName) -> bool:
    """Iterations of the real loop: on the same cards, on halves of them with rollouts ahead, or with a rank killed."""
    size, own = order.size, part == "ahead"
    with tempfile.TemporaryDirectory(prefix="ratchet-cards-") as folder, CardMemory() as memory:
        place = Path(folder)
        spec = size.experts.model_copy(update={"layers": fitting(size, shutil.disk_usage(folder).free)})
        write_random(place / "model", spec)
        settings = [*loop_settings(order, own), f"run.iterations={3 if own else 2}"]
        config = completed(tables(size, str(place / "model"), size.tokens + 16), settings, None, part)
        environment = child_python_path()
        faults = FaultFolder(place / "faults")
        if part == "killed-rank":
            faults.plan([Fault(Stage.TRAIN, 2, Point.STARTED, "trainer-0")])
            environment = with_faults(faults.path)
        found = measured("ahead" if own else "shared", tuple(settings), config, place, environment)
        stages = read_stages(place, config.run.iterations)
        order.report.figures(part, f"{spec.layers} layers", loop_figures(found, stages, spec, config))
        if part == "killed-rank":
            killed = (faults.path / "delivered").stat().st_mtime
            gradient = next(one for one in stages if (one.stage, one.iteration) == (Stage.TRAIN, 2)).updated
            order.report.figures(part, "trainer-0 killed", {"seconds to the next gradient": gradient - killed})
    order.report.figures(part, "cards", memory.peak_gib)
    return True


def fitting(size: Size, free: int) -> int:
    """Layers of the loop's model whose states fit on the disk."""
    spec = size.experts
    rest = free * 0.9 / _STATE_BYTES - 2 * spec.vocabulary * spec.hidden
    return max(1, min(size.layers, int(rest // spec.layer_parameters)))


def loop_settings(order: Order, own: bool) -> list[str]:
    """Trainer and engines over all cards, or half of them each: TP2 and one expert share a rank, engines of TP2."""
    device = Settings.from_environment().device("auto")
    ranks = order.cards // 2 if own else order.cards
    tensor = 2 if ranks > 1 else 1
    places = order.cards - ranks if own else order.cards
    shards = 2 if places > 1 and device == "cuda" else 1
    parallel = {"tensor": tensor, "sequence": tensor > 1, "data": ranks // tensor, "expert": ranks, "expert_tensor": 1}
    memory = ["offload_parameters", "drop_gradients", "offload_optimizer"]
    turns = [] if own else ["engine.sleep=true", *(f"train.memory.{name}=true" for name in memory)]
    return [
        *(f"train.parallel.{name}={json.dumps(value)}" for name, value in parallel.items()),
        f"engine.tensor={shards}", f"engine.count={places // shards if device == 'cuda' else 1}",
        f'engine.cards="{"own" if own else "shared"}"', f"rollout.ahead={int(own)}", *turns,
    ]  # fmt: skip


def loop_figures(found: Layout, stages: list[Timed], spec: ExpertModel, config: RunConfig) -> dict[str, float]:
    """The figures of a run of the loop."""
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device_name()), None)
    last = {one.stage: one.metrics for one in stages if one.iteration == config.run.iterations}
    sync, save = last[Stage.WEIGHT_SYNC], last[Stage.TRAIN]
    work = spec.operations(found.tokens, found.length_share * config.rollout.max_tokens)
    ranks = config.train.parallel.world_size
    figures = found.iteration.model_dump(exclude={"shares"}) | {
        "tokens": found.tokens, "tokens_per_s": found.tokens_per_s, "direct_tokens_per_s": found.direct_tokens_per_s,
        "direct_train_s": found.direct_train_s, "start_s": found.start_s, "host_peak_gib": found.peak_gib,
        "save_s": save.get("save_seconds"), "sync_pause_s": sync.get("pause_s"),
        "sync_probe_max": sync.get("probe_diff_max"),
        "train_mfu": None if peak is None else work / found.train_s / (peak * ranks),
    }  # fmt: skip
    return {name: value for name, value in figures.items() if value is not None}


def device_name() -> str:
    """Name of the first card, or cpu."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


PARTS: dict[PartName, Callable[[Order], bool]] = {
    "layouts-qwen3-moe": lambda order: layouts(order, "layouts-qwen3-moe", order.size.experts),
    "layouts-deepseek-v3": lambda order: layouts(order, "layouts-deepseek-v3", order.size.latent),
    "colocated": lambda order: loop(order, "colocated"),
    "ahead": lambda order: loop(order, "ahead"),
    "killed-rank": lambda order: loop(order, "killed-rank"),
}


def run_part(order: Order, part: PartName) -> int:
    """Run one part in this process."""
    try:
        complete = PARTS[part](order)
    except RatchetError as error:
        order.report.line(part=part, failed=told(error))
        return 1
    if complete:
        order.report.line(part=part, done=True)
    return int(not complete)


def run_parts(order: Order, given: argparse.Namespace) -> int:
    """Run the parts that are asked for and not finished, each in a process of its own with a time limit."""
    failed = 0
    for part in PARTS if given.part is None else (given.part,):
        if order.report.done(part):
            continue
        if order.cards < NEEDS[part]:
            reason = f"it needs {NEEDS[part]} cards, and there are {order.cards}"
            order.report.line(part=part, left_out=reason)
            continue
        words = [
            f"--cards={order.cards}",
            *(["--small"] if order.small else []),
            f"--part={part}",
            f"--out={given.out}",
        ]
        failed += limited([sys.executable, "-P", "-m", "infra.bench.eight_cards", "--here", *words], given.limit)
        order = Order(order.cards, order.small, Report(Path(given.out)))
    return min(1, failed)


def limited(command: list[str], limit_s: float) -> int:
    """Run a command in a session of its own, which ends with it or at the limit; returns 0 or 1."""
    process = subprocess.Popen(command, env=child_python_path(), start_new_session=True)
    try:
        return int(process.wait(limit_s) != 0)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"{command[-2]} did not end in {limit_s:.0f} s\n")
        return 1
    finally:
        with ended():
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def ended() -> Iterator[None]:
    """Processes may have ended by themselves."""
    try:
        yield
    except ProcessLookupError:
        return


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, default=8, help="cards to use, at most")
    parser.add_argument("--small", action="store_true", help="small models and layouts of two cards")
    parser.add_argument("--part", choices=PARTS, help="only this part")
    parser.add_argument("--out", default="eight_cards.jsonl", help="file of the figures, which is continued")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a part")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    settings = Settings.from_environment()
    if given.cards < 1:
        raise InputError(f"--cards {given.cards}: give at least 1")
    there = len(settings.gpus) if settings.device("auto") == "cuda" else given.cards  # ranks of a CPU take no cards
    order = Order(min(given.cards, there), given.small, Report(Path(given.out)))
    if given.here:
        return run_part(order, given.part)
    if there < given.cards:
        order.report.line(left_out=f"{given.cards} cards are asked for, and {there} are visible")
    return run_parts(order, given)


if __name__ == "__main__":
    sys.exit(main())
