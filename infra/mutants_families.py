"""Faults in how models with experts and multi-latent attention are divided over ranks."""

from infra.mutants_known import Mutant

_FAMILIES = ("tests/trainer_core/model/test_families.py",)

FAMILIES = (
    Mutant(
        "rotated-keys-not-summed",
        "the gradient of the rotated part of keys is that of one rank's heads",
        "trainer_core/platform/local_attention.py",
        "        if combined.size(-1) == self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:\n",
        "        if True:\n",
        _FAMILIES,
    ),
    Mutant(
        "filling-is-routed",
        "positions that fill up a batch count for the biases of experts",
        "trainer_core/model/micro_batch.py",
        "filling.unsqueeze(0) if (host.rows < 0).any() else None",
        "None",
        _FAMILIES,
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
        "norms-of-one-rank",
        "the gradient of norms is that of one rank's positions",
        "trainer_core/platform/local_spec.py",
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
