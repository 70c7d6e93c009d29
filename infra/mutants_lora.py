"""Faults in adapters that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_LORA = ("tests/trainer_core/model/test_lora.py",)
_LIVE = ("tests/tasks/engine/vllm/test_adapters.py",)
_EXPORT = ("tests/tasks/export/test_adapters.py",)
_KILLED = ("tests/faults/test_beside_the_policy.py",)

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
    Mutant(
        "base-with-adapters",
        "engines that add the adapter get weights which have it already",
        "trainer_core/weights/conversion.py",
        "_Source(model, model.adapters if adapted else {})",
        "_Source(model, model.adapters)",
        _LORA,
    ),
    Mutant(
        "adapter-of-before-is-served",
        "the adapter of the update before stays in the slot that is served",
        "tasks/engine/vllm/adapters.py",
        "        manager.remove_adapter(old)\n",
        "        adapter.id = old\n",
        _LIVE,
    ),
    Mutant(
        "adapter-never-used",
        "tokens are computed with the frozen weights alone, though the adapter is in its slot",
        "tasks/engine/vllm/adapters.py",
        "served = manager.lora_index_to_id[0] or 0",
        "served = 0 and manager.lora_index_to_id[0]",
        _LIVE,
    ),
    Mutant(
        "adapter-id-again",
        "all adapters have one id",
        "tasks/engine/vllm/adapters.py",
        "_adapter(next(self._ids), arrived",
        "_adapter(_FIRST, arrived",
        _LIVE,
    ),
    Mutant(
        "adapter-of-another-base",
        "an engine adds an adapter to other frozen weights than it was trained with",
        "tasks/engine/vllm/engine.py",
        'if planned.form == "adapter" and planned.base != self._base:',
        'if planned.form == "adapter" and planned.base == "":',
        _LIVE,
    ),
    Mutant(
        "base-once-and-for-all",
        "an engine that holds other frozen weights than the trainer's does not get these",
        "tasks/stages/transaction.py",
        "for number, one in held.items() if one != plan.base}",
        "for number, one in held.items() if one is None}",
        ("tests/tasks/stages/test_transaction.py",),
    ),
    Mutant(
        "stored-adapter-as-sums",
        "an engine that comes back gets the sums of a stored state, not the adapter that the run has served",
        "tasks/stages/transaction.py",
        'form = form or ("adapter" if context.config.engine.adapter == "live" else "whole")',
        'form = form or ("adapter" if context.config.engine.adapter == "live" and stored is None else "whole")',
        _KILLED,
    ),
)
