"""A small trainer with adapters beside frozen weights, and a small engine that serves them as they are."""

from pathlib import Path

import numpy as np

from storage.digest import bytes_digest
from storage.errors import SyncMismatch
from tasks.engine.protocol import BASE, EngineIdentity, weights_digest
from tests.small.weights import LAYERS, SIZE, factor_of, layer_of, layers_of
from tests.small.workers import SmallEngine, SmallTrainer
from trainer_core.protocol import Planned
from trainer_core.state.facts import LoraFacts
from trainer_core.weights.plan import WeightPlan, text_digest


class AdaptedTrainer(SmallTrainer):
    """A rank whose state is what is added to the frozen weights. It reads these from the model's folder."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self._frozen, self._form = None, "whole"

    def import_model(self):
        super().import_model()
        self._read_base()
        self.arrays["weights"] = np.zeros(SIZE, np.float32)

    def load(self, directory):
        self._read_base()
        return super().load(directory)

    def plan_weights(self, version, arena_bytes, form="whole"):
        self._read_base()
        super().plan_weights(version, arena_bytes)
        tensors = self._plan.tensors
        if form == "adapter":
            tensors = tuple(one.model_copy(update={"name": factor_of(one.name)}) for one in tensors)
        base = "" if form == "whole" else self._lora.base
        self._form, more = form, {"form": form, "base": base, "tensors": tensors}
        self._plan = self._plan.model_copy(update=more)
        text = self._plan.model_dump_json()
        return Planned(text_digest(text), None if self._rank else text, exchanges=1)

    def _packed(self, name, octets):
        sent = {"whole": self._sums, "base": lambda: self._frozen, "adapter": lambda: self.arrays["weights"]}
        octets[:] = layers_of(sent[self._form]())[layer_of(name)].view(np.uint8)
        return bytes_digest(octets.tobytes())

    def _sums(self):
        return self._frozen + self.arrays["weights"]

    def _read_base(self):
        digest = bytes_digest(Path(self._model_dir, "model.safetensors").read_bytes())
        self._frozen = np.random.default_rng([int(digest, 16), 0]).standard_normal(SIZE, np.float32)
        base = bytes_digest(self._frozen.tobytes())
        self._lora = LoraFacts(base=base, **self._config.lora.model_dump())


class LiveEngine(SmallEngine):
    """An engine that adds an adapter to frozen weights that an earlier update has brought."""

    def __init__(self, model_dir: str) -> None:
        super().__init__(model_dir)
        self.base, self._held, self._landing = None, {}, None
        self._arrays = {form: np.zeros(SIZE, np.float32) for form in ("base", "adapter")}

    def survey_model(self):
        return self.base

    def prepare_update(self, plan, digest, channel, first_receiver, in_flight):
        planned = WeightPlan.model_validate_json(plan)
        if planned.form == "whole" or (planned.form == "adapter" and planned.base != self.base):
            raise SyncMismatch(f"{planned.form} weights of {planned.base} do not fit what the engine has: {self.base}")
        self._landing = planned
        return super().prepare_update(plan, digest, channel, first_receiver, in_flight)

    def receive_update(self):
        if self._landing.form == "base":
            self.base = None
        return super().receive_update()

    def _loaded(self, name, octets):
        layers_of(self._arrays[self._landing.form])[layer_of(name)].view(np.uint8)[:] = octets

    def _landed(self):
        form, name = self._landing.form, factor_of if self._landing.form == "adapter" else str
        layers = layers_of(self._arrays[form])
        return {name(layer): bytes_digest(layers[layer].tobytes()) for layer in LAYERS}

    def held(self):
        return {**super().held(), BASE: self.base} if self.identity().weights_digest else {}

    def commit_update(self, version, digest):
        form, base = self._landing.form, self._landing.base
        found = None if self._arrived is None else {**self._arrived.digests, **({BASE: base} if form != "base" else {})}
        if found is None or weights_digest(found) != digest:
            raise SyncMismatch(f"weights {digest} were not received")
        self._version, self._digest, self._unusable, self._update = version, digest, None, None
        self.weights = self._arrays["base"] + self._arrays["adapter"]
        if form == "base":
            self.base, self._unusable = base, "the frozen weights are here, and no adapter yet"
        return EngineIdentity(weight_version=version, weights_digest=digest)
