"""The model of a run: a folder on any fsspec filesystem, the hub's cache, or generated."""

import json
import math
import re
import shlex
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from storage.backends.objects import url_errors
from storage.errors import InputError
from storage.ownership.scratch import scratch
from tasks.config.credentials import referenced
from tasks.config.environment import resolve, without_secrets
from tasks.config.model import ModelSection
from tasks.config.others import KEYS
from tasks.data.generated import generate_model, model_config, shapes
from tasks.data.hub import INDEX, TEXT_FILES, cached, fetch, hub_id, is_hub_id
from tasks.data.values import json_object
from trainer_core.config import CAUSAL, CLASSIFIER, is_classifier

_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
MODEL_KEY = "model.source"
_STATE = re.compile(r"(.+//)?[\w][\w.-]*@(\d+|best[\w.]*)")  # as `ratchet export` names it, or with its root


@dataclass(frozen=True)
class ModelFolder:
    """A Hugging Face directory on a filesystem."""

    shown: str  # the source as the configuration has it
    fs: Any
    path: str
    key: str = MODEL_KEY  # setting that names it

    def __str__(self) -> str:
        return f"{self.key} {self.shown}"

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        return url_errors(self.fs.unstrip_protocol(self.path))

    def files(self) -> dict[str, int]:
        """Sizes of its files in bytes, by name, sorted. Raises InputError: there is no readable folder."""
        try:
            there = self.fs.ls(self.path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(f"{self} does not exist: give a Hugging Face directory") from None
        except self._failures as error:
            raise self._unreadable("it", error) from None
        found = {str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]: entry for entry in there}
        return {name: int(entry["size"]) for name, entry in sorted(found.items()) if entry["type"] != "directory"}

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """The bytes of a file, or those from `start` to before `end`. Raises InputError: it cannot be read."""
        try:
            return self.fs.cat_file(f"{self.path}/{name}", start=start, end=end)
        except FileNotFoundError:
            raise InputError(f"{self} has no {name}: give a Hugging Face directory") from None
        except self._failures as error:
            raise self._unreadable(name, error) from None

    def document(self, name: str) -> dict[str, Any]:
        """A file that holds a JSON object. Raises InputError: it is missing, or is something else."""
        return json_object(self.read(name), f"{self}: {name}")

    def config(self) -> dict[str, Any]:
        """Content of config.json. Raises InputError: there is no folder, or none in it."""
        self.files()
        return self.document("config.json")

    def weights(self) -> list[str]:
        """Names of the files with the model's weights: those of the index, if there is one. Raises InputError: there
        are none, or the index names one that is not there."""
        there = self.files()
        if INDEX in there:
            places = self.document(INDEX).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
                raise InputError(f"{self}: {INDEX} has no weight_map: restore it from where the model came")
            named = sorted(set(places.values()))
            if missing := [file for file in named if file not in there]:
                count = f"{len(missing)} of {len(named)} files are missing"
                fact = f"{self} lacks {missing[0]}, which {INDEX} names ({count})"
                raise InputError(f"{fact}: copy or download the model again")
            return named
        if not (found := [name for name in there if name.endswith(".safetensors")]):
            other = next((f", only {name}" for name in there if name.endswith((".bin", ".pt", ".pth", ".gguf"))), "")
            raise InputError(f"{self} holds no safetensors files{other}: convert the weights first")
        return ["model.safetensors"] if "model.safetensors" in found else found

    def fetch(self, name: str, target: Path) -> None:
        """Copy a file to `target`. Raises InputError if it cannot be read."""
        try:
            self.fs.get_file(f"{self.path}/{name}", str(target))
        except self._failures as error:
            raise self._unreadable(name, error) from None

    def with_texts[Read](self, read: Callable[[Path], Read]) -> Read:
        """Result of `read` on a directory with copies of the files of the tokenizer. Raises InputError."""
        with scratch() as directory:
            for name in set(self.files()) & set(TEXT_FILES):
                self.fetch(name, directory / name)
            return read(directory)

    def _unreadable(self, what: str, error: Exception) -> InputError:
        return InputError(f"{self}: {what} cannot be read ({without_secrets(str(error))}): make it readable")


def open_model(section: ModelSection, key: str = MODEL_KEY) -> ModelFolder:
    """The directory of a model that is not generated; with `model.download` it is brought from the hub first. Errors
    call its source `key`. Raises InputError: there is no such directory, and the hub's cache does not have it."""
    source, token = (resolve(dict(section)[name], f"model.{name}") for name in ("source", "token"))
    if section.download and _names_a_hub_model(str(source)):
        return _local(section, fetch(hub_id(str(source)), None if token is None else str(token)), key)
    return find_model(section, key)


def find_model(section: ModelSection, key: str = MODEL_KEY) -> ModelFolder:
    """Like `open_model`, but nothing is fetched from the hub."""
    source = str(resolve(section.source, key))
    if _names_a_hub_model(source):
        if (folder := cached(hub_id(source))) is None:
            raise InputError(_absent(section, source, key))
        return _local(section, folder, key)
    try:
        fs, path = fsspec.core.url_to_fs(source)
        is_state = _STATE.fullmatch(source) is not None and not fs.exists(path)
    except url_errors(source) as error:
        fact = f"{key} {section.source} cannot be read ({without_secrets(str(error))})"
        raise InputError(f"{fact}: give a Hugging Face directory") from None
    if is_state:
        raise InputError(_stored(source, key))
    return ModelFolder(str(section.source), fs, path, key)


def fill_model_directory(directory: Path, section: ModelSection, seed: int, key: str = MODEL_KEY) -> list[str]:
    """Copy or generate the model that a run starts from; returns the names of its files, sorted. Raises InputError: its
    directory does not exist or holds no weights."""
    if section.generate is not None:
        generate_model(directory, section.generate, seed)
    else:
        folder = open_model(section, key)
        texts = [name for name in folder.files() if name in (*TEXT_FILES, INDEX)]
        for name in (*texts, *folder.weights()):
            folder.fetch(name, directory / name)
    return sorted(path.name for path in directory.iterdir())


def copy_files(source: str, directory: Path, wanted: Callable[[str], bool]) -> list[str]:
    """Copy the files with wanted names from a model's folder to `directory`; returns their names. Fetches nothing.
    Raises InputError: there is no such folder."""
    folder = find_model(ModelSection(source=source))
    chosen = [name for name in folder.files() if wanted(name)]
    for name in chosen:
        folder.fetch(name, directory / name)
    return chosen


def count_parameters(section: ModelSection, facts: Mapping[str, Any]) -> int:
    """The number of weights; `facts` are those of config.json. Raises InputError: the files cannot be listed."""
    if section.generate is not None:
        return sum(math.prod(shape) for _, shape in shapes(model_config(section.generate)))
    folder = open_model(section)
    sizes = folder.files()
    return parameters_in(sum(sizes[name] for name in folder.weights()), facts)


def parameters_in(size: int, facts: Mapping[str, Any]) -> int:
    """The number of weights in files of `size` bytes, of a model with these facts."""
    kind = str(facts.get("dtype") or facts.get("torch_dtype") or "float32").removeprefix("torch.")
    return size // _SIZES.get(kind, 4)


def _names_a_hub_model(source: str) -> bool:
    return source.startswith("hf://") or (is_hub_id(source) and not Path(source).exists())


def _local(section: ModelSection, folder: Path, key: str) -> ModelFolder:
    return ModelFolder(str(section.source), *fsspec.core.url_to_fs(str(folder)), key)


def _stored(source: str, key: str) -> str:
    """Refusal of a train state, whose form engines and transformers do not read, with the command that converts it."""
    root, _, which = source.rpartition("//")
    words = [which, *(["--critic"] if key == KEYS["critic"] else []), "--to", "FOLDER"]
    command = shlex.join(["ratchet", "export", *words, *([f"--root={root}"] if root else [])])
    return f"{key} {source} names a stored state, not a folder: write it to one with `{command}`, and name that"


def _absent(section: ModelSection, source: str, key: str) -> str:
    from huggingface_hub import constants

    model, as_folder = hub_id(source), "" if "://" in source else f"there is no folder {source}, and "
    name = section.source if referenced(section.source) is not None else source
    repair = "Give an existing Hugging Face directory, or set model.download = true to fetch it from the hub"
    return f"{key} {name}: {as_folder}the hub's cache ({constants.HF_HUB_CACHE}) has no model {model}. {repair}"


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
