"""Model card of an export: the README.md of its folder."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from storage.manifest import Manifest
from storage.upkeep.lineage import WeightsLineage
from tasks.config.credentials import shown_text
from tasks.config.evaluation import PASS
from tasks.config.run import RunConfig
from tasks.data.hub import hub_id, is_hub_id
from tasks.stages.prepared import MODEL
from trainer_core.config import Precision


def model_card(
    config: RunConfig, lineage: WeightsLineage, prepared: Manifest, evaluated: Manifest | None, precision: Precision
) -> str:
    """Card as Markdown, with the metadata that the hub reads."""
    inputs = sorted(prepared.parts, key=lambda part: (not part.name.startswith(MODEL), part.name))  # the model first
    known = [f"{key}: {json.dumps(value)}" for key, value in _metadata(config).items()]  # JSON is YAML
    title = [f"# {lineage.run}, iteration {lineage.version}", "", "Trained by reinforcement learning with Ratchet."]
    made_from = _table({part.name: f"xxh3-128 `{part.digest}`, {part.bytes} bytes" for part in inputs})
    rows = _table(dict(_rows(config, lineage, evaluated, precision)))
    return "\n".join(["---", *known, "---", *title, "", *rows, "", "## Made from", *made_from, ""])


def _metadata(config: RunConfig) -> dict[str, Any]:
    tags = ["ratchet", config.train.policy.method]
    known = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    source = config.model.source or ""
    return {**known, **({"base_model": hub_id(source).name} if is_hub_id(source) else {})}


def _base_model(config: RunConfig) -> str:
    if (source := config.model.source) is None:
        return "random weights (model.generate)"
    return Path(source).name if Path(source).is_absolute() else shown_text(source)  # no path of this machine


def _rows(
    config: RunConfig, lineage: WeightsLineage, evaluated: Manifest | None, precision: Precision
) -> Iterator[tuple[str, str]]:
    trained = lineage.steps[-1]
    yield "run", lineage.run
    yield "iteration", str(lineage.version)
    if trained.origin is not None:
        yield "trained by run", trained.origin.run
    yield "base model", _base_model(config)
    yield "precision of this folder", precision
    yield "weights as they were served", f"`{lineage.weights_digest}`"
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
