"""A trainer rank and an engine of a few numpy lines.

They hold weights, change them by what they are given, and answer as Megatron and vLLM do, so that the real stages,
the real loop and the real state handling run over them.
"""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
from safetensors.numpy import load_file, save_file

from storage.digest import bytes_digest, value_digest
from storage.errors import InputError, SyncMismatch
from tasks.engine.protocol import (
    COMPLETIONS,
    Collected,
    EngineIdentity,
    EngineProtocol,
    Finished,
    SyncReceipt,
    weights_digest,
)
from trainer_core.config import TrainerConfig
from trainer_core.protocol import LoadedState, SavedFiles, TrainerProtocol
from trainer_core.state.facts import FACTS_FILE, STATE_SCHEME, StateFacts, StateIdentity, facts_text, read_facts
from trainer_core.weights.records import TensorRecord

SIZE = 16384  # float32 in each array: with two ranks 32 KiB per file
ARRAYS = ("weights", "first", "second")
WEIGHTS, FILE = "model.weights", "weights-00000.safetensors"
FILES = {array: array if array == "weights" else f"optimizer.{array}" for array in ARRAYS}


def replace_file(path, content):
    """Write a file that the store may have taken as a part: under its name, not into it."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def logprobs_of(weights, sequence):
    """Log-probability of each token but the first, nat; each side computes it from its own weights."""
    tokens = np.asarray(sequence)
    return -np.abs(weights[tokens[1:] % SIZE] + weights[tokens[:-1] % SIZE]).astype(np.float32)


class SmallTrainer(TrainerProtocol):
    """One rank. All ranks hold the whole state, and each writes its share of it."""

    def __init__(self, model_dir: str, config: TrainerConfig, rank: int, other_lesson: int | None = None) -> None:
        self._model_dir, self._config, self._rank = model_dir, config, rank
        self._other_lesson = other_lesson
        self._identity = self._reference = self._reference_weights = None
        self._generators, self._step, self._lessons = "continued", 0, 0
        self.arrays = {array: np.zeros(SIZE, np.float32) for array in ARRAYS}
        self._away = {}

    def identity(self):
        return self._identity

    def adopt(self, identity):
        self._identity = identity

    def reference(self):
        return self._reference

    def generators(self):
        return self._generators

    def import_model(self):
        self._identity, self._step, self._lessons, self._away = None, 0, 0, {}
        self.arrays = {array: np.zeros(SIZE, np.float32) for array in ARRAYS}
        model = Path(self._model_dir, "model.safetensors").read_bytes()
        self.arrays["weights"] = self._noise(bytes_digest(model))

    def train_supervised(self, examples, steps, batch_size, optimizer=None):
        self._identity = None
        self._update(value_digest([examples.tokens.tolist(), steps, batch_size]), steps)
        return {"loss": 0.5, "grad_norm": 1.0, "steps": float(steps)}

    def train_policy(self, samples, temperature, reference=False):
        """One step; all that the trainer is given and all that it holds affects the result."""
        self._identity, self._lessons = None, self._lessons + 1
        if reference and self._reference_weights is None:
            raise InputError("a reference is required, but none is loaded")
        held = bytes_digest(self._reference_weights.tobytes()) if reference else ""
        given = [
            samples.tokens.tolist(),
            samples.rewards.tolist(),
            bytes_digest(samples.engine_logprobs.tobytes()),
            temperature,
            held,
        ]
        lesson = [*given, self._lessons == self._other_lesson]
        self._update(value_digest(lesson), 1)
        self._generators = "continued"
        return {"loss": float(self.arrays["first"][0]), "kl": 0.01, "entropy": 1.0, "grad_norm": 1.0, "steps": 1.0}

    def _update(self, lesson, steps):
        self.resume()
        gradient = self._noise(lesson)
        self.arrays["first"] = 0.9 * self.arrays["first"] + gradient
        self.arrays["second"] = 0.9 * self.arrays["second"] + gradient**2
        self.arrays["weights"] = self.arrays["weights"] - 0.1 * self.arrays["first"]
        self._step += steps

    def save(self, directory):
        """Write this rank's share; returns the names of its files."""
        self.resume()
        ranks, folder = self._config.parallel.world_size, Path(directory)
        names = {array: f"{name}-{self._rank}.bin" for array, name in FILES.items()}
        for array, name in names.items():
            replace_file(folder / name, np.array_split(self.arrays[array], ranks)[self._rank].tobytes())
        if self._rank:
            # a file that has two names is stored by a copy, all others by a hard link: kills cover both
            (folder / f"held-{self._rank}").unlink(missing_ok=True)
            os.link(folder / names["weights"], folder / f"held-{self._rank}")
            return SavedFiles(tuple(names.values()), self._identified())
        optimizer, parallel = self._config.optimizer, self._config.parallel
        facts = StateFacts(
            step=self._step, optimizer_updates=self._lessons, optimizer=optimizer, parallel=parallel, precision="fp32"
        )
        replace_file(folder / FACTS_FILE, facts_text(facts).encode())
        replace_file(folder / "common.json", json.dumps({"step": self._step, "lessons": self._lessons}).encode())
        return SavedFiles((*names.values(), FACTS_FILE, "common.json"), self._identified())

    def load(self, directory):
        self._identity, self._away, facts = None, {}, read_facts(directory)
        common = json.loads((Path(directory) / "common.json").read_text())
        self._step, self._lessons = common["step"], common["lessons"]
        self.arrays = {array: self._read(directory, array, facts) for array in ARRAYS}
        self._generators = "restored" if facts.parallel == self._config.parallel else "reseeded"
        return LoadedState(
            facts.step, self._generators, facts.parallel, facts.optimizer, facts.optimizer_updates, self._identified()
        )

    def _identified(self):
        """Identity of what this rank holds; every rank holds everything."""
        return StateIdentity(
            scheme=STATE_SCHEME,
            tensors=value_digest({name: bytes_digest(array.tobytes()) for name, array in self.arrays.items()}),
            progress=value_digest([self._step, self._lessons]),
            generators="",
        )

    def logprobs(self, sequences, temperature=1.0):
        self._need("weights")
        return [logprobs_of(self.arrays["weights"], sequence) for sequence in sequences]

    def load_reference(self, directory, identity):
        self._reference_weights = self._read(directory, "weights", read_facts(directory))
        self._reference = identity

    def export(self, directory):
        self._need("weights")
        if self._rank:
            return []
        weights = self.arrays["weights"]
        save_file({WEIGHTS: weights}, Path(directory) / FILE)
        digest = bytes_digest(weights.tobytes())
        return [TensorRecord(name=WEIGHTS, dtype="float32", shape=(SIZE,), digest=digest, file=FILE)]

    def release(self, memory):
        """What is given up cannot be used until it is put back."""
        given_up = ["weights"] * memory.offload_parameters + ["first", "second"] * memory.offload_optimizer
        moved = {name: self.arrays.pop(name) for name in given_up if name in self.arrays}
        self._away |= moved
        return sum(array.nbytes for array in moved.values())

    def resume(self):
        self._need(*ARRAYS)

    def _need(self, *names):
        self.arrays |= {name: self._away.pop(name) for name in names if name in self._away}

    def close(self):
        pass

    def _read(self, directory, array, facts):
        files = [Path(directory) / f"{FILES[array]}-{rank}.bin" for rank in range(facts.parallel.world_size)]
        return np.frombuffer(b"".join(file.read_bytes() for file in files), np.float32)

    def _noise(self, digest):
        return np.random.default_rng([int(digest, 16), self._step]).standard_normal(SIZE, np.float32)


class SmallEngine(EngineProtocol):
    """Its samples depend only on the weights it holds, the prompt and the seed."""

    def __init__(self, model_dir: str) -> None:
        self._weights, self._digest, self._version = None, None, None
        self._queued = []

    def identity(self):
        return EngineIdentity(weight_version=self._version, weights_digest=self._digest)

    def receive(self, directory, version, records):
        tensors = load_file(Path(directory) / FILE)
        digests = {name: bytes_digest(tensor.tobytes()) for name, tensor in tensors.items()}
        if digests != {record.name: record.digest for record in records}:
            raise SyncMismatch("the weights that arrived are not those that were sent")
        self._weights, self._digest, self._version = tensors[WEIGHTS], weights_digest(digests), version
        size = (Path(directory) / FILE).stat().st_size
        return SyncReceipt(version=version, digests=digests, weights_digest=self._digest, bytes=size, seconds=0.0)

    def generate(self, prompts, seeds, sampling):
        """Digits, and the stop token at the end."""
        responses = [self._response(prompt, seed, sampling) for prompt, seed in zip(prompts, seeds, strict=True)]
        columns = [
            pa.array([tokens for tokens, _ in responses], pa.list_(pa.int32())),
            pa.array([logprobs for _, logprobs in responses], pa.list_(pa.float32())),
            pa.array(["stop"] * len(responses)),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=COMPLETIONS)

    def enqueue(self, *batch):
        self._queued.append(batch)

    def collect(self, wait_s):
        """One batch after another, as on CPU."""
        if not self._queued:
            return Collected([], 0)
        number, *batch = self._queued.pop(0)
        completions = self.generate(*batch)
        return Collected([Finished(number, completions)], completions.num_rows)

    def drop(self):
        self._queued.clear()

    def score(self, sequences):
        weights = np.zeros(SIZE, np.float32) if self._weights is None else self._weights
        return [logprobs_of(weights, sequence) for sequence in sequences]

    def _response(self, prompt, seed, sampling):
        assert self._digest is not None, "an engine without weights was asked to sample"
        place = value_digest([np.asarray(prompt).tolist(), seed if sampling.temperature else 0])
        random = np.random.default_rng([int(self._digest, 16), int(place, 16)])
        digits = random.integers(3, 13, random.integers(0, sampling.max_tokens)).tolist()
        return [*digits, sampling.stop_token_ids[0]], (-random.random(len(digits) + 1, np.float32)).tolist()
