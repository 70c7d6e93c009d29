"""Faults in a trainer's planning and sending of an update of the engines that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_PLANNING = ("tests/trainer_core/weights/test_plan.py",)
_IMPORTED = "tests/trainer_core/weights/test_sync.py::test_what_was_imported_arrives_bit_for_bit"
_FAULTS = "tests/trainer_core/weights/test_sync_faults.py::test_"
_NOT_WHOLE = (f"{_FAULTS}a_model_that_is_not_whole_stops_all_ranks_with_the_name",)
_LAYOUTS = "tests/trainer_core/weights/test_sync_layouts.py::test_"
_UNEQUAL = f"{_LAYOUTS}unequal_stages_and_divided_sequences_send_everything_once"
_STORED = (f"{_FAULTS}the_weights_of_a_stored_state_are_sent_and_the_live_ones_come_back",)
_FLOAT32 = (f"{_IMPORTED}[deepseek-v3-pp2-bf16]",)
_SHARDS = (f"{_IMPORTED}[llama-tied-tp2-pp2-fp32]",)
_NAMING = ("tests/trainer_core/weights/test_mappings.py",)
_PACKING = ("tests/trainer_core/weights/test_packing.py",)
_EXPERTS = (f"{_IMPORTED}[deepseek-v3-tp2-sp-dp2-ep2-fp32]",)
_EXPORTED = "tests/trainer_core/weights/test_whole.py::test_"
_WHOLE = (f"{_EXPORTED}what_the_bridge_exports_arrives_with_the_same_bytes",)

PLAN = (
    Mutant(
        "names-of-one-stage",
        "the bridge exports only the weights that this rank's own stage holds",
        "trainer_core/weights/whole.py",
        "if t.place.rank in stages for row",
        "if t.place.rank == dist.get_rank() for row",
        _WHOLE,
    ),
    Mutant(
        "exported-as-planned",
        "what only the bridge exports is not compared with the plan before it is sent",
        "trainer_core/weights/update.py",
        "(*self._conversions.values(), *self._others, self._whole))",
        "(*self._conversions.values(), self._whole))",
        (f"{_EXPORTED}what_changed_after_the_plan_is_told_before_a_byte_moves",),
    ),
    Mutant(
        "configuration-as-planned",
        "a rank converts by another configuration than it has told, and leaves the others in the middle of the export",
        "trainer_core/weights/update.py",
        "*self._others, self._whole))",
        "*self._others))",
        (f"{_EXPORTED}what_changed_after_the_plan_is_told_before_a_byte_moves",),
    ),
    Mutant(
        "conversions-are-kept",
        "what the first update found of the model is used for the later ones",
        "trainer_core/weights/update.py",
        "        found, self._others, problem = _found(model, form)\n",
        '        found, self._others, problem = vars(mesh).setdefault("found", _found(model, form))\n',
        _NOT_WHOLE,
    ),
    Mutant(
        "everything-in-one-type",
        "all tensors are cast to the type of the weights on their way out",
        "trainer_core/weights/conversion.py",
        "part[:rows] if name in vocabulary else part for name",
        "(part[:rows] if name in vocabulary else part).to(self._model.dtype) for name",
        _FLOAT32,
    ),
    Mutant(
        "biases-stay-rounded",
        "biases of routers that something has cast, which megatron-bridge itself does not, are sent in low precision",
        "trainer_core/model/model.py",
        "part._maintain_float32_expert_bias()",
        "pass",
        (f"{_FAULTS}biases_of_routers_are_sent_in_the_type_in_which_they_are_used",),
    ),
    Mutant(
        "borrowed-biases-are-rounded",
        "stored weights, and the live ones meanwhile, are kept in the type of most of them, which rounds the biases",
        "trainer_core/phases/reference.py",
        'tensor.detach().to("cpu", copy=True)',
        'tensor.detach().to("cpu", model.dtype, copy=True)',
        _STORED,
    ),
    Mutant(
        "padding-is-sent",
        "rows that only pad the vocabulary are sent too",
        "trainer_core/weights/conversion.py",
        "part[:rows] if name in vocabulary else part for name",
        "part for name",
        _SHARDS,
    ),
    Mutant(
        "shards-in-another-order",
        "the shards of tensor-parallel ranks are put together in the wrong order",
        "trainer_core/weights/exchange.py",
        "everyones.view(group.size(), -1):",
        "everyones.view(group.size(), -1).flip(0):",
        _SHARDS,
    ),
    Mutant(
        "experts-by-their-local-numbers",
        "a rank sends its experts under the numbers that they have on it",
        "trainer_core/weights/mappings.py",
        "        return _megatron_local_name_to_global(self._chunks, self._config, name, stage)\n",
        "        return name\n",
        _EXPERTS,
    ),
    Mutant(
        "layers-counted-as-if-even",
        "layers get their numbers as if all stages of the pipeline had equally many",
        "trainer_core/weights/mappings.py",
        "        return _megatron_local_name_to_global(self._chunks, self._config, name, stage)\n",
        "        from megatron.core import parallel_state\n\n"
        '        parts = name.split(".")\n'
        '        if "layers" in parts:\n'
        "            each = self._config.num_layers // parallel_state.get_pipeline_model_parallel_world_size()\n"
        "            parts[2] = str(int(parts[2]) + each * parallel_state.get_pipeline_model_parallel_rank())\n"
        '        return ".".join(parts)\n',
        (f"{_UNEQUAL}[first1]",),
    ),
    Mutant(
        "one-rank-of-a-context-sends",
        "of the ranks that divide sequences only the first sends, also of what each has for itself",
        "trainer_core/weights/update.py",
        "            if wanted and bucket.sender in dist",
        "            if parallel_state.get_context_parallel_rank():\n"
        "                return\n"
        "            if wanted and bucket.sender in dist",
        (f"{_UNEQUAL}[cp2-ep2]",),
    ),
    Mutant(
        "sent-without-putting-back",
        "weights that were given up after the plan are sent as they are, and shares of replicas are not gathered",
        "trainer_core/trainer.py",
        '        with paused(), self._model.weights("readable"):\n            return self._send(',
        "        if True:\n            return self._send(",
        (f"{_LAYOUTS}weights_that_were_given_up_arrive_all_the_same",),
    ),
    Mutant(
        "further-predictions-are-built",
        "the trainer builds layers that predict further tokens, which nothing trains",
        "trainer_core/config.py",
        '    check_predictions(model, "the model")\n',
        "",
        (f"{_LAYOUTS}a_model_with_layers_that_predict_further_tokens_is_refused_by_the_trainer",),
    ),
    Mutant(
        "every-owner-sends",
        "what two pipeline stages hold is sent by both",
        "trainer_core/weights/plan.py",
        "                if row.name not in seen:\n",
        "                if row.tensors:\n",
        _PLANNING,
    ),
    Mutant(
        "replicas-are-not-compared",
        "ranks that hold different models send what the first one holds",
        "trainer_core/weights/plan.py",
        "                _check_equal(first, other, expert)\n",
        "                pass\n",
        _PLANNING,
    ),
    Mutant(
        "senders-one-after-the-other",
        "a pipeline stage converts its weights only when engines have read those of the stage before",
        "trainer_core/weights/plan.py",
        "    order = packer.turns()\n",
        "    order = list(range(len(packer.sizes)))\n",
        _PLANNING,
    ),
    Mutant(
        "a-layer-under-the-name-of-the-first",
        "what a mapping makes of a weight has the names of the first weight of its kind",
        "trainer_core/weights/conversion.py",
        "            return tried.named(known.names)\n",
        "            return tried\n",
        _EXPERTS,
    ),
    Mutant(
        "an-expert-under-the-number-of-the-first-layer",
        "what stands behind the number of a layer has the Hugging Face name that it has in the first layer",
        "trainer_core/weights/mappings.py",
        "            names = tuple(template.format(layer) for template in seen.templates)\n",
        "            names = tuple(template.format(0) for template in seen.templates)\n",
        _NAMING,
    ),
    Mutant(
        "a-layer-with-a-pattern-of-its-own-is-like-the-others",
        "names are taken for one kind though the bridge has a pattern for one of them",
        "trainer_core/weights/mappings.py",
        "kind in self._apart or ",
        "",
        _NAMING,
    ),
    Mutant(
        "names-that-are-computed-are-filled-in",
        "numbers of Hugging Face names are taken for those of Megatron's, though a mapping computes them",
        "trainer_core/weights/mappings.py",
        "        return templates if tuple(one.format(*numbers) for one in templates) == names_of(mapping) else None\n",
        "        return templates\n",
        _NAMING,
    ),
    Mutant(
        "rows-of-another-weight",
        "a mapping takes the rows of a weight that it has converted before",
        "trainer_core/weights/conversion.py",
        "        asked = (*bounds, *map(type, bounds), *how.items())\n",
        "        asked = (*bounds[1:], *how.items())\n",
        ("tests/trainer_core/weights/test_conversion.py",),
    ),
    Mutant(
        "packed-tensors-are-kept",
        "what was made of weights stays on the card until everything is sent",
        "trainer_core/weights/conversion.py",
        "        self._packing = None\n\n\nclass",
        "\n\nclass",
        ("tests/trainer_core/weights/test_conversion.py",),
    ),
    Mutant(
        "everything-is-converted-ahead",
        "what is not a view of a weight is made before its turn too, and takes the memory of all buckets",
        "trainer_core/weights/conversion.py",
        "                if one.views:\n",
        "                if one.live is not None:\n",
        ("tests/trainer_core/weights/test_conversion.py",),
    ),
    Mutant(
        "a-tensor-that-is-not-there-is-not-missed",
        "a bucket is published though a planned tensor of it was not written",
        "trainer_core/weights/packing.py",
        "        if missing := [name for name in self._planned if name not in self._sources]:\n",
        "        self._whole = [name for name in self._whole if name in self._sources]\n        if missing := []:\n",
        _PACKING,
    ),
    Mutant(
        "tensors-of-another-type-are-packed",
        "a tensor is packed as it is though another type was planned",
        "trainer_core/weights/packing.py",
        "            if tensor.dtype != element_type(planned.dtype) or tensor.shape != planned.shape:\n",
        "            if tensor.shape != planned.shape:\n",
        _PACKING,
    ),
    Mutant(
        "layers-by-their-digits",
        "layers are sent in the order of their numbers as text",
        "trainer_core/weights/plan.py",
        'int(numbered["layer"])',
        'ord(numbered["layer"][0])',
        _PLANNING,
    ),
    Mutant(
        "absent-weights-are-sent",
        "weights that were moved away are planned and sent as they are",
        "trainer_core/weights/mappings.py",
        "    if tensor.numel() == 0 or tensor.untyped_storage()",
        "    if name is None and tensor.untyped_storage()",
        _NOT_WHOLE,
    ),
    Mutant(
        "borrowed-weights-under-the-old-identity",
        "while stored weights are in place, the trainer says that it holds the state of before",
        "trainer_core/trainer.py",
        "        self._identity = None\n        with found.in_place():\n",
        "        with found.in_place():\n",
        _STORED,
    ),
    Mutant(
        "a-plan-outlives-training",
        "weights are sent by a plan from before the training",
        "trainer_core/trainer.py",
        "self._identity, self._update = None, None",
        "self._identity = None",
        (f"{_FAULTS}nothing_is_sent_without_a_plan_of_the_weights_of_now",),
    ),
)
