"""Faults in the division of models with experts and multi-latent attention over ranks."""

from infra.mutants_known import Mutant

_FAMILIES = ("tests/trainer_core/model/test_families.py",)
_COMPUTES = "tests/trainer_core/model/test_families.py::test_a_layout_computes_what_transformers_and_one_rank_do"
_COUNTS = "tests/trainer_core/model/test_families.py::test_routers_count_what_belongs_to_samples_and_nothing_else"
_CONTEXT = (f"{_COMPUTES}[qwen3-moe-cp2-ep2]",)
_OBJECTIVES = ("tests/trainer_core/phases/test_objectives.py::test_a_step_is_that_of_a_plain_implementation",)

FAMILIES = (
    Mutant(
        "kernels-checked-by-ranks-alone",
        "that no kernel can divide the sequences is found when ranks build the model",
        "tasks/model_checks/fitness.py",
        "        check_context(config.train, True, bool(config.device.deterministic))\n",
        "",
        ("tests/tasks/test_checks.py",),
    ),
    Mutant(
        "windows-over-divided-sequences",
        "the sequences of a model with windows are divided for an attention that has none",
        "tasks/model_checks/fitness.py",
        "            architectures.check_full_attention(facts, where)\n",
        "            pass\n",
        ("tests/tasks/test_checks.py",),
    ),
    Mutant(
        "rotated-keys-not-summed",
        "the gradient of the rotated part of keys is that of one rank's heads",
        "trainer_core/platform/local_layers.py",
        "        if combined.size(-1) == self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:\n",
        "        if True:\n",
        _FAMILIES,
    ),
    Mutant(
        "filling-is-routed",
        "positions that fill up a batch count for the biases of experts",
        "trainer_core/model/micro_batch.py",
        'own["filling"].unsqueeze(0) if host.filling.any() or group is not None else None',
        "None",
        (_COUNTS,),
    ),
    Mutant(
        "outputs-summed-twice",
        "the gradient of the divided positions is summed over ranks twice",
        "trainer_core/model/model.py",
        "tensor_parallel_output_grad=False",
        "tensor_parallel_output_grad=True",
        _FAMILIES,
    ),
    Mutant(
        "sequence-sums-of-one-rank",
        "a sum over a divided sequence is that of one rank's tokens",
        "trainer_core/objectives/tokens.py",
        "return own if self.group is None else _SumOverRanks.apply(own, self.group)",
        "return own",
        _OBJECTIVES,
    ),
    Mutant(
        "sequence-gradient-of-one-rank",
        "the gradient of a sum over a divided sequence is that of one rank's loss",
        "trainer_core/objectives/tokens.py",
        "        return _added(grads[0], ctx.group), None\n",
        "        return grads[0], None\n",
        ("tests/trainer_core/objectives/test_tokens.py",),
    ),
    Mutant(
        "divided-loss-counted-by-each-rank",
        "each of the ranks that divide a sequence counts its whole loss",
        "trainer_core/model/passes.py",
        "batch.segments.own_sum(result.loss)",
        "batch.segments.sum(result.loss)",
        _CONTEXT,
    ),
    Mutant(
        "filling-of-a-share-counts",
        "positions that fill up a divided sequence count for the biases of experts",
        "trainer_core/batches/flat.py",
        "tokens, filling = np.zeros_like(positions), np.ones_like(real)\n",
        "tokens, filling = np.zeros_like(positions), np.zeros_like(real)\n",
        (_COUNTS,),
    ),
    Mutant(
        "keys-in-the-order-of-ranks",
        "keys of the other ranks are taken for those of other positions",
        "trainer_core/platform/local_layers.py",
        "    return rank * lengths.sum() + starts[segment] + place\n",
        "    return np.arange(whole.sum())\n",
        _CONTEXT,
    ),
    Mutant(
        "rotated-by-places-in-the-share",
        "a divided sequence is rotated by places among the positions that a rank holds",
        "trainer_core/batches/flat.py",
        "        positions=positions,\n        filling=filling,\n",
        "        positions=_ranges(np.zeros_like(lengths), lengths),\n        filling=filling,\n",
        _CONTEXT,
    ),
    Mutant(
        "uneven-stages-dropped",
        "the number of layers of the first stage does not reach Megatron",
        "trainer_core/model/settings.py",
        '        "num_layers_in_first_pipeline_stage": config.parallel.layers_first_stage,\n',
        '        "num_layers_in_first_pipeline_stage": None,\n',
        (f"{_COMPUTES}[qwen3-uneven]",),
    ),
    Mutant(
        "states-of-divided-sequences-are-others",
        "a state of ranks that divide sequences is not one of as many replicas",
        "trainer_core/config.py",
        "        return ParallelConfig(tensor=self.tensor, pipeline=self.pipeline, data=self.replicas)\n",
        "        return ParallelConfig(tensor=self.tensor, pipeline=self.pipeline, data=self.data)\n",
        ("tests/trainer_core/test_config.py",),
    ),
    Mutant(
        "norms-of-one-rank",
        "the gradient of norms is that of one rank's positions",
        "trainer_core/platform/local_layers.py",
        "    norm.weight.sequence_parallel = config.sequence_parallel ",
        "    norm.weight.sequence_parallel = False ",
        _FAMILIES,
    ),
    Mutant(
        "export-rounds-biases",
        "an export in bf16 rounds the biases of routers",
        "tasks/export/export.py",
        '_WRITTEN["fp32" if e.in_fp32 else written]',
        "_WRITTEN[written]",
        ("tests/tasks/export/test_experts.py",),
    ),
    Mutant(
        "export-swaps-experts",
        "an export has two experts in each other's place",
        "trainer_core/hugging_face.py",
        "{found['after']}{next(rest)}",
        "{found['after']}{next(rest) ^ 1}",
        ("tests/tasks/export/test_experts.py",),
    ),
)
