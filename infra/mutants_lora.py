"""Faults in adapters that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_LORA = ("tests/trainer_core/model/test_lora.py",)
_EXPORT = ("tests/tasks/export/test_adapters.py",)

LORA = (
    Mutant(
        "base-is-sent",
        "engines get the frozen weights without their adapters",
        "trainer_core/weights/conversion.py",
        "return self.tensor.detach() if self.adapter is None else",
        "return self.tensor.detach() if self.tensor is not None else",
        _LORA,
    ),
    Mutant(
        "factor-of-one-rank",
        "of a divided matrix the factor that every rank has gets the gradient of one rank alone",
        "trainer_core/model/adapters.py",
        "                dist.all_reduce(gradient, group=place.group)\n",
        "                gradient.add_(0)\n",
        _LORA,
    ),
    Mutant(
        "frozen-weights-in-the-state",
        "the frozen weights are saved with each state",
        "trainer_core/model/model.py",
        "return bool(self.adapters) and isinstance(",
        "return not self.adapters and isinstance(",
        _LORA,
    ),
    Mutant(
        "adapters-of-any-base",
        "adapters are loaded beside other frozen weights than those they were trained with",
        "trainer_core/trainer.py",
        "            base = base_digest(self._model, self._mesh)\n",
        '            base = "frozen"\n',
        _LORA,
    ),
    Mutant(
        "recomputed-layers-without-gradients",
        "recomputed layers get an input without a gradient",
        "trainer_core/model/model.py",
        "lambda _module, _given, hidden: hidden.requires_grad_()",
        "lambda _module, _given, hidden: hidden",
        _LORA,
    ),
    Mutant(
        "reference-has-the-adapters",
        "the reference computes with the adapters as they are now",
        "trainer_core/phases/reference.py",
        "if not model.is_frozen(tensor)]",
        "if not model.adapters]",
        _LORA,
    ),
    Mutant(
        "export-without-adapters",
        "an export gives the frozen weights",
        "trainer_core/hugging_face.py",
        "        if not self.factors or (lora",
        "        if self.factors or (lora",
        _EXPORT,
    ),
)
