"""A trainer rank and an engine of a few numpy lines.

They hold weights, change them by what they are given, and answer as Megatron and vLLM do, so that the real stages,
the real loop and the real state handling run over them.
"""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa

from storage.digest import bytes_digest, value_digest
from storage.errors import InputError, SyncMismatch
from tasks.data.backends import Plain, token_bytes
from tasks.data.generated import character_tokenizer
from tasks.engine.ends import complete_after
from tasks.engine.protocol import (
    COMPLETIONS,
    Arrived,
    Collected,
    EngineIdentity,
    EngineProtocol,
    Finished,
    weights_digest,
)
from tests.small.channel import SmallEnd, tensors_of, told
from tests.small.critic import SmallCritic
from tests.small.files import replace_file
from tests.small.growing import going_on, grown
from tests.small.weights import LAYERS, SIZE, layer_of, layers_of, logprobs_of, plan_of
from trainer_core.batches.routes import Routing
from trainer_core.batches.sequences import TeacherScores, TopTokens
from trainer_core.config import TrainerConfig
from trainer_core.protocol import LoadedState, Planned, SavedFiles, Sent, TrainerProtocol
from trainer_core.state.facts import FACTS_FILE, STATE_SCHEME, StateFacts, StateIdentity, check_base, read_facts
from trainer_core.weights.plan import WeightPlan, text_digest

ARRAYS = ("weights", "first", "second")
LONGEST = 6  # tokens of a response whose limit is shorter, if that did not cut it off
FILES = {array: array if array == "weights" else f"optimizer.{array}" for array in ARRAYS}
ROUTING = Routing(experts=256, layers=1, chosen=2)
_BYTES = token_bytes(Plain(character_tokenizer()))


class SmallTrainer(TrainerProtocol):
    """One rank. All ranks hold the whole state, and each writes its share of it."""

    def __init__(self, model_dir: str, config: TrainerConfig, rank: int, other_lesson: int | None = None) -> None:
        self._model_dir, self._config, self._rank = model_dir, config, rank
        self._other_lesson = other_lesson
        self._plan = None
        self._identity = self._reference = self._reference_weights = None
        self._generators, self._step, self._lessons, self._lora = "continued", 0, 0, None
        self.arrays = {array: np.zeros(SIZE, np.float32) for array in ARRAYS}
        self._away, self._critic = {}, SmallCritic(config, rank)

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
        self._critic.begin(self.arrays["weights"])

    def train_supervised(self, examples, steps, batch_size, optimizer=None):
        self._identity = None
        self._update(value_digest([examples.tokens.tolist(), steps, batch_size]), steps)
        return {"loss": 0.5, "grad_norm": 1.0, "steps": float(steps)}

    def train_policy(self, samples, temperature, reference=False):
        """Take one step; all that the trainer is given and all that it holds affects the result."""
        self._identity, self._lessons = None, self._lessons + 1
        if reference and self._reference_weights is None:
            raise InputError("a reference is required, but none is loaded")
        if self._config.experts.replay:
            ROUTING.check(samples.routes)
        held = bytes_digest(self._reference_weights.tobytes()) if reference else ""
        given = [
            samples.tokens.tolist(),
            samples.rewards.tolist(),
            bytes_digest(samples.engine_logprobs.tobytes()),
            temperature,
            held,
            None if samples.teacher_logprobs is None else bytes_digest(samples.teacher_logprobs.tobytes()),
        ]
        top = () if samples.teacher_top is None else (samples.teacher_top.tokens, samples.teacher_top.logprobs)
        given += [bytes_digest(one.tobytes()) for one in (*top, samples.routes) if one is not None]
        lesson = [*given, self._lessons == self._other_lesson, *filter(None, [self._critic.digest])]
        known = samples.per_response_token(samples.usable)  # `policy_logprobs`: those of the engine and a quarter
        self._before = np.where(known, samples.engine_logprobs + np.float32(0.25), np.float32(np.nan))
        self._update(value_digest(lesson), 1)
        self._critic.learn(value_digest(lesson))
        self._generators = "continued"
        return {"loss": float(self.arrays["first"][0]), "kl": 0.01, "entropy": 1.0, "grad_norm": 1.0, "steps": 1.0}

    def policy_logprobs(self):
        return self._before if self._rank == 0 else np.zeros(0, np.float32)

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
            return SavedFiles((*names.values(), *self._critic.save(folder)), self._identified())
        optimizer, parallel = self._config.optimizer, self._config.parallel.ranks
        facts = StateFacts(
            step=self._step, optimizer_updates=self._lessons, optimizer=optimizer, parallel=parallel, precision="fp32",
            transformer_engine=False, lora=self._lora,
        )  # fmt: skip
        replace_file(folder / FACTS_FILE, facts.model_dump_json(indent=1).encode())
        replace_file(folder / "common.json", json.dumps({"step": self._step, "lessons": self._lessons}).encode())
        written = (*names.values(), FACTS_FILE, "common.json", *self._critic.save(folder))
        return SavedFiles(written, self._identified())

    def load(self, directory):
        self._identity, self._away, facts = None, {}, self._facts(directory)
        common = json.loads((Path(directory) / "common.json").read_text())
        self._step, self._lessons = common["step"], common["lessons"]
        self.arrays = {array: self._read(directory, array, facts) for array in ARRAYS}
        critic = self._critic.load(Path(directory), facts.parallel.world_size, self.arrays["weights"])
        self._generators = "restored" if facts.parallel == self._config.parallel.ranks else "reseeded"
        return LoadedState(
            facts.step,
            self._generators,
            facts.optimizer,
            facts.optimizer_updates,
            self._identified().model_copy(update={"critic": critic}),
        )

    def state_identity(self):
        self.resume()
        return self._identified()

    def _identified(self):
        """Identity of this rank's content; every rank holds everything."""
        return StateIdentity(
            scheme=STATE_SCHEME,
            tensors=value_digest({name: bytes_digest(array.tobytes()) for name, array in self.arrays.items()}),
            progress=value_digest([self._step, self._lessons, *([] if self._lora is None else [self._lora.base])]),
            generators="",
            critic=self._critic.digest,
        )

    def logprobs(self, sequences, temperature=1.0):
        self._need("weights")
        return [logprobs_of(self._sums(), sequence) for sequence in sequences]

    def load_reference(self, directory, identity):
        self._reference_weights = self._read(directory, "weights", self._facts(directory))
        self._reference = identity

    def teacher_scores(self, directory, samples, temperature):
        """Values that depend on the teacher's weights and on each sample's place."""
        model = bytes_digest(Path(directory, "model.safetensors").read_bytes())
        noise = np.random.default_rng(int(model[:15], 16)).random(int(samples.response_lengths.sum()), np.float32)
        found = (-noise * temperature * samples.per_response_token(samples.usable)).astype(np.float32)
        top, count = self._config.policy.distill.top_k, np.arange(len(found), dtype=np.float32)[:, None]
        tokens = np.tile(np.arange(top, dtype=np.int32), (len(found), 1))
        return TeacherScores(found, TopTokens(tokens, found[:, None] - count - tokens) if top else None)

    def plan_weights(self, version, arena_bytes, form="whole"):
        self._plan = plan_of(version, self._config.parallel.world_size)
        return Planned(
            text_digest(self._plan.model_dump_json()), None if self._rank else self._plan.model_dump_json(), exchanges=1
        )

    def send_weights(self, digest, channel, stored=None):
        self._need("weights")
        plan, self._plan = self._plan, None
        live = self.arrays["weights"]
        if stored is not None:
            self.arrays["weights"] = self._read(stored, "weights", self._facts(stored))
        try:
            return self._sent(plan, digest, channel)
        finally:
            self.arrays["weights"] = live

    def _sent(self, plan, digest, channel):
        if plan is None or text_digest(plan.model_dump_json()) != digest:
            raise SyncMismatch(f"rank {self._rank} has no plan {digest}")
        digests, own = {}, [bucket for bucket in plan.buckets if bucket.sender == self._rank]
        if own:
            with told(SmallEnd(channel, plan)) as end:
                for bucket in own:
                    end.signals.free(bucket)
                    for tensor in tensors_of(plan, bucket):
                        digests[tensor.name] = self._packed(tensor.name, end.octets(bucket, tensor))
                    end.signals.publish(bucket)
                end.signals.read_by_all(self._rank)
        return Sent(digests, {"convert": 0.0})

    def _packed(self, name, octets):
        """Copy a layer to the place where it is read; its digest."""
        octets[:] = layers_of(self._sums())[name].view(np.uint8)
        return bytes_digest(octets.tobytes())

    def release(self, memory):
        """Make memory unusable until it is put back."""
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

    def _sums(self):
        """The weights that compute."""
        return self.arrays["weights"]

    def _facts(self, directory):
        facts = read_facts(directory)
        check_base(directory, facts, self._lora)
        return facts

    def _read(self, directory, array, facts):
        files = [Path(directory) / f"{FILES[array]}-{rank}.bin" for rank in range(facts.parallel.world_size)]
        return np.frombuffer(b"".join(file.read_bytes() for file in files), np.float32)

    def _noise(self, digest):
        return np.random.default_rng([int(digest, 16), self._step]).standard_normal(SIZE, np.float32)


class SmallEngine(EngineProtocol):
    """An engine whose samples depend only on its weights, the prompt and the seed."""

    workers = 1
    """Number of receivers of an update for which it stands."""

    def __init__(self, model_dir: str) -> None:
        self.weights = np.zeros(SIZE, np.float32)
        self._digest, self._version = None, None
        self._unusable, self._update, self._arrived = None, None, None
        self._queued, self._sampled = [], {}  # batches; whole responses of one that is not finished
        self._left = {}  # what the next `drop` gives

    def identity(self):
        held = None if self._unusable else self._version
        return EngineIdentity(weight_version=held, weights_digest=None if held is None else self._digest)

    def survey_model(self):
        """Do nothing: there is no model to survey."""

    def prepare_update(self, plan, digest, channel, first_receiver, in_flight):
        plan = WeightPlan.model_validate_json(plan)
        names = sorted(layer_of(tensor.name) for tensor in plan.tensors)
        if names != sorted(LAYERS):
            raise SyncMismatch(f"the plan has {names}, but the model {LAYERS}")
        self._update, self._arrived = (plan, channel, first_receiver), None
        self._left = self.drop()
        return text_digest(plan.model_dump_json())

    def receive_update(self):
        """Write in place, layer by layer; the weights are unusable from the first on."""
        if self._update is None:
            raise SyncMismatch("no weight update was prepared")
        plan, channel, number = self._update
        with told(SmallEnd(channel, plan)) as end:
            for bucket in plan.buckets:
                end.signals.published(bucket)
                self._unusable = "a weight update began and did not finish"
                for tensor in tensors_of(plan, bucket):
                    self._loaded(tensor.name, end.octets(bucket, tensor))
                for worker in range(self.workers):
                    end.signals.release(bucket, number + worker)
        self._arrived = Arrived(digests=self._landed(), landed=len(plan.tensors), bytes=4 * SIZE, seconds={"load": 0.0})
        return self._arrived

    def _loaded(self, name, octets):
        """Load a layer from its place in the arena."""
        layers_of(self.weights)[name].view(np.uint8)[:] = octets

    def commit_update(self, version, digest):
        if self._arrived is None or weights_digest(self._arrived.digests) != digest:
            raise SyncMismatch(f"weights {digest} were not received")
        self._version, self._digest, self._unusable, self._update = version, digest, None, None
        return self.identity()

    def abort_update(self, reason):
        if self._update is not None:
            self._update = None
            self._unusable = reason if self._unusable else None
        return self._unusable is None

    def sleep(self):
        return False

    def wake(self):
        pass

    def refuse(self, reason):
        self._unusable = reason

    def held(self):
        usable = self.identity().weight_version is not None
        return self._landed() if usable else {}

    def _landed(self):
        return {name: bytes_digest(layer.tobytes()) for name, layer in layers_of(self.weights).items()}

    def generate(self, prompts, seeds, sampling):
        """Sample digits, and the stop token at the end."""
        self._check_usable()
        responses = [self._response(prompt, seed, sampling) for prompt, seed in zip(prompts, seeds, strict=True)]
        columns = [
            pa.array(column, kind) for column, kind in zip(zip(*responses, strict=True), COMPLETIONS.types, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=COMPLETIONS)

    def enqueue(self, number, prompts, seeds, sampling, begun=(), every=None, name=""):
        there = [len(one.tokens) for one in begun] or [0] * len(prompts)
        self._queued.append((number, prompts, seeds, sampling, begun, every, there, name))

    def collect(self, wait_s):
        """Finish one batch after another, as on CPU; each call lets the responses of the first grow once, or end."""
        if not self._queued:
            return Collected([], 0)
        number, prompts, seeds, sampling, begun, every, there, _ = self._queued[0]
        whole = self._sampled.get(number) or self.generate(prompts, seeds, sampling)
        self._sampled[number] = whole
        if every is not None and (some := grown(number, whole, there, every.tokens, self._version)):
            return Collected([], 0, some)
        self._queued.pop(0), self._sampled.pop(number)
        return Collected([Finished(number, going_on(whole, begun), self._version)], whole.num_rows)

    def drop(self):
        """Forget batches, and give what was sampled: each response is a token ahead of what was told of it."""
        left, self._left = self._left, {}
        for number, *_, there, name in self._queued:
            if name and number in self._sampled:
                left[name] = [*left.get(name, []), *grown(number, self._sampled[number], there, 1, self._version)]
        self._queued.clear(), self._sampled.clear()
        return {name: some for name, some in left.items() if some}

    def score(self, sequences):
        self._check_usable()
        return [logprobs_of(self.weights, sequence) for sequence in sequences]

    def _check_usable(self):
        if self._unusable:
            raise SyncMismatch(f"the engine's weights cannot be used: {self._unusable}")

    def _response(self, prompt, seed, sampling):
        assert self._digest is not None, "an engine without weights was asked to sample"
        place = value_digest([np.asarray(prompt).tolist(), seed if sampling.temperature else 0])
        random = np.random.default_rng([int(self._digest, 16), int(place, 16)])
        digits = random.integers(
            3, 3 + (sampling.top_k or 10), random.integers(0, max(sampling.max_tokens, LONGEST))
        ).tolist()
        tokens = [*(digits[:1] * len(digits) if sampling.min_p else digits), sampling.stop_token_ids[0]]
        end = complete_after(tokens, sampling.stop, _BYTES) or len(tokens)
        logprobs, most = (-random.random(len(tokens), np.float32)).tolist(), min(end, sampling.max_tokens)
        return tokens[:most], logprobs[:most], "stop" if most == end else "length"
