"""Files of a Hugging Face directory that a run takes."""

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
"""All but the weights."""

INDEX = "model.safetensors.index.json"
"""Table of the file of each tensor, if there are several files."""
WEIGHTS_PATTERNS = ("*.safetensors", INDEX)
"""The weights, as shell patterns."""


def is_weights(name: str) -> bool:
    """True if a file holds weights, or their index."""
    return name.endswith((".safetensors", ".safetensors.index.json"))
