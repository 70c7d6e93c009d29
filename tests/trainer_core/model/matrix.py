"""Layouts that are tested with each family of models, and pairs of settings that fit four ranks.

A layout is a product of few settings. Every two settings that fit together on `RANKS` ranks meet in some layout of each
kind of model, as `test_families.py` checks, so that every conflict of two is found.
"""

import itertools
from collections.abc import Callable, Iterator

from trainer_core.config import ParallelConfig, stage_layers

RANKS = 4
MOST = 24
"""Layouts of a family."""

SETTINGS: dict[str, Callable[[ParallelConfig], bool]] = {
    "TP": lambda layout: layout.tensor > 1,
    "SP": lambda layout: layout.sequence,
    "PP": lambda layout: layout.pipeline > 1,
    "uneven": lambda layout: layout.layers_first_stage is not None or layout.layers_last_stage is not None,
    "VPP": lambda layout: layout.virtual_pipeline is not None,
    "EP": lambda layout: layout.expert > 1,
    "ETP": lambda layout: layout.expert_tensor not in (None, layout.tensor),
    "CP": lambda layout: layout.context > 1,
    "DP": lambda layout: layout.data > 1,
}
LAYERS = (4, 6)
"""Layers of the models: virtual stages of unequal ranks need the larger number."""

SINGLE = "single"
TP = {"tensor": 2, "sequence": True}
UNEVEN, UNEVEN_LAST = {"pipeline": 2, "layers_first_stage": 3}, {"pipeline": 2, "layers_last_stage": 1}
VPP = {"pipeline": 2, "virtual_pipeline": 2}
_BOTH = {
    SINGLE: {},
    "tp2-sp": TP,
    "pp2": {"pipeline": 2},
    "uneven": UNEVEN,
    "cp2": {"context": 2},
    "cp4": {"context": 4},
    "uneven-vpp2": {**VPP, "layers_first_stage": 4},
}
DENSE = {
    **_BOTH,
    "tp2": {"tensor": 2},
    "dp2": {"data": 2},
    "pp4": {"pipeline": 4},
    "tp2-pp2-vpp2": {"tensor": 2, **VPP},
    "tp2-sp-uneven": {**TP, **UNEVEN},
    "tp2-sp-pp2-vpp2": {**TP, **VPP},
    "tp2-cp2": {"tensor": 2, "context": 2},
    "tp2-sp-cp2": {**TP, "context": 2},
    "tp2-sp-dp2": {**TP, "data": 2},
    "uneven-cp2": {**UNEVEN_LAST, "context": 2},
    "uneven-dp2": {**UNEVEN_LAST, "data": 2},
    "pp2-vpp2-cp2": {**VPP, "context": 2},
    "pp2-vpp2-dp2": {**VPP, "data": 2},
    "cp2-dp2": {"context": 2, "data": 2},
}
EXPERTS = {
    **_BOTH,
    "dp2-ep2": {"data": 2, "expert": 2},
    "cp2-ep2": {"context": 2, "expert": 2},
    "cp2-etp2": {"context": 2, "expert_tensor": 2},
    "tp2-sp-ep2-etp1": {**TP, "expert": 2, "expert_tensor": 1},
    "tp2-sp-dp2-ep2": {**TP, "data": 2, "expert": 2},
    "tp2-sp-cp2-ep2": {**TP, "context": 2, "expert": 2},
    "tp2-sp-pp2": {**TP, "pipeline": 2},
    "tp2-sp-uneven-ep2-etp1": {**TP, **UNEVEN, "expert": 2, "expert_tensor": 1},
    "tp2-sp-pp2-vpp2-ep2-etp1": {**TP, **VPP, "expert": 2, "expert_tensor": 1},
    "tp2-sp-cp2-ep2-etp1": {**TP, "context": 2, "expert": 2, "expert_tensor": 1},
    "tp2-sp-dp2-ep2-etp1": {**TP, "data": 2, "expert": 2, "expert_tensor": 1},
    "uneven-cp2-ep2": {**UNEVEN_LAST, "context": 2, "expert": 2},
    "uneven-dp2-ep2": {**UNEVEN_LAST, "data": 2, "expert": 2},
    "pp2-vpp2-cp2-ep2": {**VPP, "context": 2, "expert": 2},
    "pp2-vpp2-dp2-ep2": {**VPP, "data": 2, "expert": 2},
    "cp2-dp2-ep4": {"context": 2, "data": 2, "expert": 4},
}
MATRIX = {
    family: {name: ParallelConfig(**given) for name, given in layouts.items()}
    for family, layouts in {
        "qwen3": DENSE, "qwen3-moe": EXPERTS, "deepseek-v3": EXPERTS,
        # layers of qwen3 without two of their norms: every setting of dense models once
        "llama": {name: DENSE[name] for name in (SINGLE, "tp2", "tp2-sp-uneven", "tp2-sp-pp2-vpp2", "cp2-dp2")},
        # differs from deepseek-v3 only in the projection of queries
        "deepseek-v3-without-q-lora": {name: EXPERTS[name] for name in (SINGLE, "tp2-sp-uneven-ep2-etp1", "cp2-ep2")},
    }.items()
}  # fmt: skip
QUICK = {
    ("qwen3", SINGLE), ("qwen3", "tp2-sp-cp2"), ("qwen3", "uneven"), ("qwen3-moe", SINGLE), ("qwen3-moe", "cp2-ep2"),
    ("qwen3-moe", "dp2-ep2"), ("deepseek-v3", SINGLE), ("deepseek-v3", "tp2-sp"), ("deepseek-v3", "cp2"),
}  # fmt: skip
"""Layouts of the quick suite."""
_OF_EXPERTS = (
    "tp2-sp-uneven-ep2-etp1", "tp2-sp-pp2-vpp2-ep2-etp1", "tp2-sp-cp2-ep2-etp1", "tp2-sp-dp2-ep2-etp1",
    "uneven-cp2-ep2", "uneven-dp2-ep2", "uneven-vpp2", "pp2-vpp2-cp2-ep2", "pp2-vpp2-dp2-ep2", "cp2-dp2-ep4",
)  # fmt: skip
DAILY = QUICK | {
    *(("qwen3", name) for name in (
        "tp2-sp-pp2-vpp2", "tp2-sp-dp2", "tp2-sp-uneven", "uneven-cp2", "uneven-dp2", "uneven-vpp2", "pp2-vpp2-cp2",
        "pp2-vpp2-dp2", "cp2-dp2",
    )),
    *zip(itertools.cycle(("qwen3-moe", "deepseek-v3")), _OF_EXPERTS),
    ("llama", SINGLE), ("llama", "tp2-sp-uneven"),
    ("deepseek-v3-without-q-lora", SINGLE), ("deepseek-v3-without-q-lora", "cp2-ep2"),
}  # fmt: skip
"""Layouts of CI: every pair of settings for a dense model, and for one of the two families with experts."""


def layers(layout: ParallelConfig) -> int:
    """Layers of the model that a layout is tested with: the fewest that it can divide."""
    return next(number for number in LAYERS if _divides(layout, number))


def settings(layout: ParallelConfig) -> set[str]:
    """The settings of a layout that are not the default."""
    return {name for name, has in SETTINGS.items() if has(layout)}


def pairs(layouts: Iterator[ParallelConfig]) -> set[tuple[str, str]]:
    """Every two settings that meet in a layout."""
    return {pair for layout in layouts for pair in itertools.combinations(sorted(settings(layout)), 2)}


def fitting(experts: bool) -> Iterator[ParallelConfig]:
    """Every layout of at most `RANKS` ranks for a model with four experts or without any, and its pipeline of two."""
    sizes = (1, 2, 4)
    uneven = ({}, {"layers_first_stage": 3}, {"layers_first_stage": 4})
    for tensor, context, data, pipeline in itertools.product(sizes, sizes, sizes, (1, 2)):
        virtual = (None, 2) if pipeline > 1 else (None,)
        several = {"tensor": tensor, "context": context, "data": data, "pipeline": pipeline}
        if tensor * context * data * pipeline > RANKS:
            continue
        of_experts = itertools.product(sizes, (None, *sizes)) if experts else [(1, None)]
        for parts, stages, (expert, split) in itertools.product(virtual, uneven, of_experts):
            for sequence in {tensor > 1, experts and tensor > 1}:
                given = {"virtual_pipeline": parts, "expert": expert, "expert_tensor": split, "sequence": sequence}
                divided = tensor * context * data % (expert * (split or tensor)) == 0
                if divided and (pipeline > 1 or not stages):
                    layout = ParallelConfig(**several, **given, **stages)
                    if any(_divides(layout, number) for number in LAYERS):
                        yield layout


def _divides(layout: ParallelConfig, number: int) -> bool:
    stages = stage_layers(layout, number)
    return stages is not None and all(stage % (layout.virtual_pipeline or 1) == 0 for stage in stages)
