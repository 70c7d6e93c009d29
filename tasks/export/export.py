"""Export: the weights of one iteration as a Hugging Face folder, from storage alone, proven by digests. Tensors stream
from the stored state into the shards one at a time. Imports torch; Megatron is imported by the first export."""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, JsonValue

from storage.backends.root import Root
from storage.errors import DigestMismatch, InputError
from storage.layout import STATE
from storage.manifest import Manifest
from storage.ownership.scratch import scratch
from storage.parts import materialize, read_part
from storage.upkeep.lineage import WeightsLineage, of_weights
from tasks.config.credentials import shown_text
from tasks.config.evaluation import PASS
from tasks.config.run import RunConfig
from tasks.config.stored import stored_config
from tasks.data.hub import INDEX, hub_id, is_hub_id, is_weights
from tasks.data.models import classifier_config
from tasks.engine.protocol import BASE, weights_digest
from tasks.export.order import Chosen, ExportFolder, ExportSettings
from tasks.stages.names import WORKFLOW, Stage
from tasks.stages.prepared import MODEL, other_parts
from tasks.stages.views import Served
from trainer_core.config import Precision, decoder_of
from trainer_core.platform.platform import prepare
from trainer_core.state.facts import CRITIC, needed_for_values, needed_for_weights
from trainer_core.state.files import SavedState
from trainer_core.weights.digest import tensor_digest
from trainer_core.weights.packing import dtype_name

_ALIGNMENT = 8
_BYTES = {"BF16": 2, "F16": 2, "F32": 4}

SHARD_BYTES = 4 << 30
_WRITTEN: dict[Precision, tuple[torch.dtype, str]] = {"fp32": (torch.float32, "F32"), "bf16": (torch.bfloat16, "BF16")}
_ADAPTER, _ADAPTER_CONFIG, _BASE = "adapter_model.safetensors", "adapter_config.json", "base"
_CONFIG, _GENERATION, _CARD = "config.json", "generation_config.json", "README.md"


@dataclass(frozen=True)
class ShardTensor:
    name: str
    shape: tuple[int, ...]
    dtype: str  # name in safetensors: F32, BF16

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]


def planned_shards(tensors: Iterable[ShardTensor], limit: int) -> dict[str, list[ShardTensor]]:
    """Tensors of each file, in order; a file holds at most `limit` bytes of them, or a single tensor."""
    shards: list[list[ShardTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{at:05d}-of-{len(shards):05d}.safetensors": shard for at, shard in enumerate(shards, 1)}


def header(shard: Sequence[ShardTensor]) -> bytes:
    """Bytes of a file before its tensors."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard:
        ends = [offset, offset + tensor.bytes]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": ends}
        offset += tensor.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def write_shards(
    target: ExportFolder, shards: dict[str, list[ShardTensor]], tensors: Iterator[tuple[str, memoryview]]
) -> dict[str, object]:
    """Write all files, taking the bytes of one tensor after another in the planned order; returns the index."""
    for file_name, shard in shards.items():
        with target.file(file_name) as file:
            file.write(header(shard))
            for planned in shard:
                name, data = next(tensors)
                if (name, data.nbytes) != (planned.name, planned.bytes):
                    raise ValueError(f"{planned} was planned, but {name} with {data.nbytes} bytes came")
                file.write(data)
    total = sum(tensor.bytes for shard in shards.values() for tensor in shard)
    places = {tensor.name: file_name for file_name, shard in shards.items() for tensor in shard}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


if TYPE_CHECKING:
    from trainer_core.hugging_face import Exporting, StoredWeights  # imports Megatron


class Exported(BaseModel, frozen=True, extra="forbid"):
    run: str
    iteration: int
    folder: str  # the folder or URL
    precision: Precision  # type of the weights in it
    weights_digest: str
    """Identity of the weights as they were served, with which the export is compared; of a reward model, its own."""
    tensors: int
    bytes: int  # size of the weights
    files: dict[str, str]  # xxh3-128 of each file, by name


def export(
    root: Root,
    chosen: Chosen,
    target: ExportFolder,
    precision: Precision | None,
    limit: int = SHARD_BYTES,
    critic: bool = False,
) -> Exported:
    """Write the weights of an iteration as a Hugging Face folder; of a run that trains a reward model this one, as a
    classifier with one label; or its `critic`, as one with a constant. `precision` is by default that of the state; a
    state in bf16 exported as fp32 holds the same values. The biases of routers are fp32 in any. A shard has at most
    `limit` bytes. Raises DigestMismatch (the state does not give the weights that were served, or a part of it is
    damaged), InputError (the architecture cannot be exported, or the iteration has no critic, or no reward model yet)
    or StorageError (a file reads back otherwise than it was written)."""
    kind = _kind(root, chosen, critic)
    with _opened(root, chosen, kind) as (weights, state, model_config):
        live = _live(root, chosen, weights, state)
        written = precision or state.facts.precision
        types = {name: _WRITTEN["fp32" if e.in_fp32 else written] for e in weights.entries for name in e.names}
        named = [pair for e in weights.entries for pair in zip(e.names, e.shapes, strict=True)]
        planned = [ShardTensor(name, shape, types[name][1]) for name, shape in named]
        shards = planned_shards(planned, limit)
        target.begin()
        digests: dict[str, str] = {}
        index = write_shards(target, shards, _streamed(weights, types, digests))
    exported = weights_digest(digests if live is None else live)
    if kind != "policy":  # no engine of the run was sent these
        model_config = classifier_config(model_config, _stop_tokens(chosen.manifest(Stage.PREPARE, 0)))
    else:
        _compare(chosen, exported)
    if len(shards) > 1:
        target.write(INDEX, _json(index))
    _write_texts(root, chosen, target, written, model_config, kind)
    model_config.pop("torch_dtype", None)  # the name of `dtype` in older files
    target.finish(_json({**model_config, "dtype": dtype_name(_WRITTEN[written][0])}))
    return _made(chosen, target, written, exported, planned)


def export_adapter(root: Root, chosen: Chosen, target: ExportFolder) -> Exported:
    """Write the adapters of an iteration as a folder that peft loads beside the model that the run began with, which
    the folder names; one that the run has generated is in it. Their sum is compared with what was served. Raises
    InputError: the run trains no adapters, or more than these; else as `export`."""
    config = stored_config(root, chosen.run)
    if config.train.experts.bias_update_rate:
        fact = f"run {chosen.run!r} also moves the biases of routers (train.experts.bias_update_rate)"
        raise InputError(f"{fact}, which a folder of adapters cannot hold: export without --adapter")
    with _opened(root, chosen) as (weights, state, _):
        if (lora := state.facts.lora) is None:
            raise InputError(f"run {chosen.run!r} trains whole weights, not adapters: leave --adapter out")
        _compare(chosen, served := weights_digest(_served(root, chosen, weights, state)))
        kind = _WRITTEN[state.facts.precision][1]
        planned = [ShardTensor(name, tuple(factor.shape), kind) for name, factor in weights.factors()]
        target.begin()
        write_shards(target, {_ADAPTER: planned}, ((name, _bytes(factor)) for name, factor in weights.factors()))
    _write_card(root, chosen, target, state.facts.precision)
    generated = {} if config.model.source else chosen.manifest(Stage.PREPARE, 0).below(MODEL)
    for name, part in generated.items():
        target.write(f"{_BASE}/{name}", read_part(root, part))
    base = config.model.source or f"{target.shown}/{_BASE}"
    model = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
    scale = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.targets)}
    content = {"peft_type": "LORA", **model, **scale, "lora_dropout": 0.0, "bias": "none"}
    target.finish(_json(content), _ADAPTER_CONFIG)
    return _made(chosen, target, state.facts.precision, served, planned)


def _made(chosen: Chosen, to: ExportFolder, kind: Precision, digest: str, planned: Sequence[ShardTensor]) -> Exported:
    size, of_run = sum(tensor.bytes for tensor in planned), {"run": chosen.run, "iteration": chosen.iteration}
    about = {"weights_digest": digest, "tensors": len(planned), "bytes": size, "files": to.digests}
    return Exported(**of_run, folder=to.shown, precision=kind, **about)


def export_as(root: Root, chosen: Chosen, target: ExportFolder, settings: ExportSettings) -> Exported:
    """Write what the settings ask for; raises as `export` and `export_adapter`."""
    if settings.adapter:
        return export_adapter(root, chosen, target)
    return export(root, chosen, target, settings.precision, critic=settings.critic)


def stored_digests(root: Root, chosen: Chosen) -> dict[str, str]:
    """`tensor_digest` by name of the weights of a stored state; raises as `export`, except for the digests."""
    with _opened(root, chosen) as (weights, state, _model_config):
        return _served(root, chosen, weights, state)


def _served(root: Root, chosen: Chosen, weights: "StoredWeights", state: SavedState) -> dict[str, str]:
    """Digests of what engines are sent, by name."""
    live = _live(root, chosen, weights, state)
    return {name: tensor_digest(tensor) for name, tensor in weights} if live is None else live


def _live(root: Root, chosen: Chosen, weights: "StoredWeights", state: SavedState) -> dict[str, str] | None:
    """Digests of a live adapter and its frozen weights; None if engines are sent the sums."""
    if stored_config(root, chosen.run).engine.adapter != "live" or state.facts.lora is None:
        return None
    return {**{name: tensor_digest(factor) for name, factor in weights.factors()}, BASE: state.facts.lora.base}


def _kind(root: Root, chosen: Chosen, critic: bool) -> "Exporting":
    """Purpose of an export: the critic, or else what the run trains. Raises InputError: the state does not hold it."""
    scores = stored_config(root, chosen.run).train.policy.loss.trains_critic
    if (critic or scores) and not chosen.manifest(Stage.TRAIN).below(f"{STATE}{CRITIC}/"):
        which = f"iteration {chosen.iteration} of run {chosen.run!r}"
        if not scores:
            raise InputError(f"{which} has no critic (train.critic): leave --critic out, or name a run that has one")
        fact = f"{which} is what its reward model begins with, and has none"
        raise InputError(f"{fact}: export a later one, or the run that it is from")
    return "critic" if critic else "rewards" if scores else "policy"


def _folder(prepared: Manifest, kind: "Exporting") -> str:
    """Prefix of the parts of the model that what is exported began with."""
    return "critic/" if kind != "policy" and other_parts(prepared, "critic") else MODEL


@contextmanager
def _opened(
    root: Root, chosen: Chosen, kind: "Exporting" = "policy"
) -> Iterator[tuple["StoredWeights", SavedState, dict[str, Any]]]:
    """Weights of a stored state, or of its critic, the state, and the content of the model's config.json."""
    with scratch() as folder:
        prepared, trained = chosen.manifest(Stage.PREPARE, 0), chosen.manifest(Stage.TRAIN)
        model_config = json.loads(read_part(root, prepared.part(_folder(prepared, kind) + _CONFIG)))
        (folder / _CONFIG).write_text(json.dumps(model_config | decoder_of(model_config)), encoding="utf-8")
        policy = kind == "policy"
        materialize(root, trained, folder / "state", STATE, needed_for_weights if policy else needed_for_values)
        state = SavedState(folder / "state" / ("" if policy else CRITIC), weights_alone=True)
        if state.facts.lora is not None:  # what adapters are added to is not part of the state
            materialize(root, prepared, folder, MODEL, is_weights)
        prepare("cpu")
        from trainer_core.hugging_face import StoredWeights  # imports Megatron, which must be prepared first

        yield StoredWeights(folder, state, int(model_config["vocab_size"]), kind), state, model_config


def _streamed(
    weights: "StoredWeights", types: Mapping[str, tuple[torch.dtype, str]], digests: dict[str, str]
) -> Iterator[tuple[str, memoryview]]:
    """Bytes of each tensor; `digests` receives the digest of each tensor as it was served."""
    for name, tensor in weights:
        digests[name] = tensor_digest(tensor)
        yield name, _bytes(tensor.to(types[name][0]))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _compare(chosen: Chosen, found: str) -> None:
    synced = chosen.find(Stage.WEIGHT_SYNC, chosen.iteration)
    served = found if synced is None else Served(synced).weights_digest  # stored samples are trained on without engines
    if found != served:
        fact = f"the state of iteration {chosen.iteration} of run {chosen.run!r} gives weights {found}"
        repair = "the folder is left unfinished. Check the store with `ratchet verify`"
        raise DigestMismatch(f"{fact}, but {served} were served: {repair}")


def _write_texts(
    root: Root, chosen: Chosen, target: ExportFolder, precision: Precision, model_config: dict, kind: "Exporting"
) -> None:
    """Write everything but weights and config.json: the tokenizer's files as the run got them, and the card."""
    prepared = chosen.manifest(Stage.PREPARE, 0)
    there = prepared.below(_folder(prepared, kind))
    others = {name: part for name, part in there.items() if name != _CONFIG and not is_weights(name)}
    texts = {name: read_part(root, part) for name, part in others.items()}
    # generation settings of the model, with the stop tokens of the run
    known = {key: model_config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    used = {"eos_token_id": stop} if (stop := _stop_tokens(prepared)) else {}
    generation = {**known, **json.loads(texts.get(_GENERATION, b"{}")), **used}
    texts[_GENERATION] = _json({key: value for key, value in generation.items() if value is not None})
    for name, text in texts.items():
        target.write(name, text)
    _write_card(root, chosen, target, precision, kind)


def _write_card(
    root: Root, chosen: Chosen, target: ExportFolder, precision: Precision, kind: "Exporting" = "policy"
) -> None:
    config, prepared = stored_config(root, chosen.run), chosen.manifest(Stage.PREPARE, 0)
    lineage = of_weights(root, WORKFLOW, chosen.run, chosen.iteration)
    evaluated = chosen.find(Stage.EVALUATE, chosen.iteration)
    target.write(_CARD, model_card(config, lineage, prepared, evaluated, precision, kind).encode())


def _stop_tokens(prepared: Manifest) -> list[JsonValue]:
    stop = prepared.facts.get("stop_tokens")
    return stop if isinstance(stop, list) else []


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def model_card(
    config: RunConfig,
    lineage: WeightsLineage,
    prepared: Manifest,
    evaluated: Manifest | None,
    precision: Precision,
    kind: "Exporting",
) -> str:
    """Card as Markdown, with the metadata that the hub reads."""
    inputs = sorted(prepared.parts, key=lambda part: (not part.name.startswith(MODEL), part.name))  # the model first
    known = [f"{key}: {json.dumps(value)}" for key, value in _metadata(config, kind).items()]  # JSON is YAML
    name = f"# {lineage.run}, iteration {lineage.version}{', critic' if kind == 'critic' else ''}"
    title = [name, "", "Trained by reinforcement learning with Ratchet."]
    made_from = _table({part.name: f"xxh3-128 `{part.digest}`, {part.bytes} bytes" for part in inputs})
    rows = _table(dict(_rows(config, lineage, evaluated, precision, kind)))
    return "\n".join(["---", *known, "---", *title, "", *rows, "", "## Made from", *made_from, ""])


def _metadata(config: RunConfig, kind: "Exporting") -> dict[str, Any]:
    tags = ["ratchet", config.train.policy.method]
    task = "text-generation" if kind == "policy" else "text-classification"
    known = {"library_name": "transformers", "pipeline_tag": task, "tags": tags}
    source = config.model.source or ""
    return {**known, **({"base_model": hub_id(source).name} if is_hub_id(source) else {})}


def _base_model(config: RunConfig) -> str:
    if (source := config.model.source) is None:
        return "random weights (model.generate)"
    return Path(source).name if Path(source).is_absolute() else shown_text(source)  # no path of this machine


def _rows(
    config: RunConfig, lineage: WeightsLineage, evaluated: Manifest | None, precision: Precision, kind: "Exporting"
) -> Iterator[tuple[str, str]]:
    trained = lineage.steps[-1]
    yield "run", lineage.run
    yield "iteration", str(lineage.version)
    if trained.origin is not None:
        yield "trained by run", trained.origin.run
    yield "base model", _base_model(config)
    yield "precision of this folder", precision
    yield from [("weights as they were served", f"`{lineage.weights_digest}`")] if kind == "policy" else []
    yield "manifest of the train state", f"`{trained.digest}`"
    yield "configuration", f"`{trained.config_digest}`"
    yield "code", ", ".join(sorted({step.code_version for step in lineage.steps}))
    yield "finished", f"{trained.finished:%Y-%m-%d %H:%M} UTC"
    if evaluated is not None:
        passing = evaluated.facts.get(PASS)
        named = {"reward_mean": "held-out mean reward", "pass_rate": f"held-out pass rate ({passing})"}
        for metric, name in named.items():
            if (value := evaluated.metrics.get(metric)) is not None:
                yield name, f"{value:.4f}"


def _table(rows: Mapping[str, str]) -> list[str]:
    return ["| | |", "| --- | --- |", *(f"| {name} | {text.replace('|', r'\|')} |" for name, text in rows.items())]
