"""Reward models as Hugging Face folders: classifiers with one label, whose score is a value after a sequence."""

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from trainer_core.config import CAUSAL, CLASSIFIER, is_classifier


def folder_gives_values(directory: str) -> bool:
    """True if the model in a directory is a classifier; False if it has no config.json."""
    path = Path(directory, "config.json")
    return path.is_file() and is_classifier(json.loads(path.read_text(encoding="utf-8")))


def classifier_config(facts: Mapping[str, Any], ends: Container[object]) -> dict[str, Any]:
    """config.json of the reward model over a model with these `facts`, whose responses may end with the tokens `ends`.
    Its problem is a regression, or servers would put the value through a sigmoid. transformers reads the value behind
    the last token that is not padding: a padding token that may end a response is therefore left out."""
    padding = facts.get("pad_token_id")
    family = str(facts["architectures"][0]).removesuffix(CAUSAL).removesuffix(CLASSIFIER)
    own = {
        "architectures": [family + CLASSIFIER],
        "id2label": {"0": "reward"}, "label2id": {"reward": 0}, "problem_type": "regression",
        "pad_token_id": None if padding in ends else padding,
    }  # fmt: skip
    return {**{key: value for key, value in facts.items() if key != "num_labels"}, **own}
