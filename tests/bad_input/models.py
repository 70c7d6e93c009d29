"""Hugging Face directories with one thing wrong each; made with numpy, in milliseconds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tasks.config.model import GeneratedModel
from tasks.data.generated import generate_model, shapes

Change = Callable[[Path], object]

SPEC = GeneratedModel(hidden=64, intermediate=64, heads=2, kv_heads=1, max_positions=64)


def make(directory: Path) -> Path:
    """A good model of two layers, in two files with an index."""
    directory.mkdir(parents=True)
    generate_model(directory, SPEC, 0)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[:10], "model-00002-of-00002.safetensors": names[10:]}
    for file, own in halves.items():
        save_file({name: tensors[name] for name in own}, directory / file)
    places = {name: file for file, own in halves.items() for name in own}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def config(**changes: object) -> Change:
    """Change values in config.json; None removes a key."""

    def change(directory: Path) -> None:
        path = directory / "config.json"
        document = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))

    return change


def cut(directory: Path) -> None:
    path = directory / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def no_header(directory: Path) -> None:
    (directory / "model-00002-of-00002.safetensors").write_bytes(b"\xff" * 64)


def broken_header(directory: Path) -> None:
    path = directory / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[8] = ord("?")
    path.write_bytes(data)


def without(name: str) -> Change:
    return lambda directory: (directory / name).unlink()


def index_with_more(directory: Path) -> None:
    path = directory / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    document["weight_map"]["model.layers.7.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(document))


def tensor(name: str, value: np.ndarray | None) -> Change:
    """Replace a tensor, or remove it."""

    def change(directory: Path) -> None:
        (directory / "model.safetensors.index.json").unlink(missing_ok=True)
        parts = sorted(directory.glob("model-*.safetensors"))
        tensors = {key: array for part in parts for key, array in load_file(part).items() if key != name}
        for part in parts:
            part.unlink()
        save_file(tensors | ({} if value is None else {name: value}), directory / "model.safetensors")

    return change


def only_pickles(directory: Path) -> None:
    for part in directory.glob("*.safetensors*"):
        part.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"")


def text(name: str, content: str) -> Change:
    return lambda directory: (directory / name).write_text(content)


def in_hub_cache(home: Path, name: str, revision: str = "main") -> Path:
    """A good model in the place where huggingface_hub's cache has it."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    made = make(home / "made")
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / revision).write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir()
    (repository / "blobs").mkdir()
    snapshot.mkdir()
    for path in made.iterdir():  # as the hub's client leaves them: links to blobs
        blob = repository / "blobs" / path.name
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(blob)
    return snapshot


def fill_weights(directory: Path) -> None:
    """Write the weights that a directory's config.json describes, all zero."""
    facts = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": False}
    tensors = {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes(facts)}
    save_file(tensors, directory / "model.safetensors")
