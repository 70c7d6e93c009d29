"""Faults in the trainer's batches and passes that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_MODEL = ("tests/trainer_core/model/test_layouts.py",)
_TRAINER = ("tests/trainer_core/test_trainer.py",)
_LOGITS = ("tests/trainer_core/model/test_vocab_parallel.py",)
_EFFECTIVE = ("tests/trainer_core/model/test_effective.py",)
_REENTRY = ("tests/trainer_core/model/test_reentry.py",)

TRAINER = (
    Mutant(
        "attention-across-sequences",
        "without Transformer Engine, sequences of a micro-batch attend to each other",
        "trainer_core/platform/local_layers.py",
        "        blocks=tuple(zip(counts.tolist(), found.tolist(), strict=True)),\n",
        "        blocks=((1, int(lengths.sum())),),\n",
        _MODEL,
    ),
    Mutant(
        "one-pass-too-many",
        "a single update is preceded by a scoring pass",
        "trainer_core/phases/policy.py",
        "if several or scores or self.policy.scores_first:",
        "if units.size:",
        _TRAINER,
    ),
    Mutant(
        "engine-as-trainer",
        "the engine's log-probabilities are stored as the trainer's",
        "trainer_core/phases/policy.py",
        "np.where(counted, before.logprobs, np.float32(np.nan))",
        "np.where(counted, samples.engine_logprobs, np.float32(np.nan))",
        _MODEL,
    ),
    Mutant(
        "untrained-has-log-probabilities",
        "a sample that was not trained on has numbers of the trainer",
        "trainer_core/phases/policy.py",
        "np.where(counted, before.logprobs, np.float32(np.nan))",
        "np.where(counted, before.logprobs, np.float32(0))",
        _TRAINER,
    ),
    Mutant(
        "trainer-of-other-samples",
        "the trainer's log-probabilities are stored under the names of other samples",
        "tasks/stages/training_set.py",
        "names.select(NAMES)",
        'names.select(NAMES).sort_by("sample_id")',
        ("tests/tasks/stages/test_train.py",),
    ),
    Mutant(
        "mean-over-micro-batches",
        "the loss is normalised within each micro-batch",
        "trainer_core/model/passes.py",
        "total = (batch.segments.own_sum(result.loss) * batch.weights).sum()",
        "total = (batch.segments.own_sum(result.loss) * batch.weights).mean()",
        _MODEL,
    ),
    Mutant(
        "micro-batches-differ-in-number",
        "a data-parallel rank leaves out its empty micro-batches",
        "trainer_core/batches/micro_batching.py",
        "    return [filled[replica::replicas] for replica in range(replicas)]\n",
        "    return [[batch for batch in filled[replica::replicas] if len(batch)] for replica in range(replicas)]\n",
        ("tests/trainer_core/batches",),
    ),
    Mutant(
        "log-ratio-unbounded",
        "log-ratios are not clamped",
        "trainer_core/objectives/tokens.py",
        "(upper - lower).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)",
        "(upper - lower)",
        ("tests/trainer_core/objectives",),
    ),
    Mutant(
        "logits-changed-in-place",
        "logits that are kept for the backward pass are divided in place",
        "trainer_core/model/vocab_parallel.py",
        "wide if temperature == 1 else wide / temperature",
        "wide if temperature == 1 else wide.div_(temperature)",
        _LOGITS,
    ),
    Mutant(
        "all-logits-at-once",
        "log-probabilities are not computed in chunks",
        "trainer_core/model/vocab_parallel.py",
        "    size = max(1, elements // max(1, logits.shape[1]))\n",
        "    size = max(1, logits.shape[0])\n",
        _LOGITS,
    ),
    Mutant(
        "entropy-without-gradient",
        "the entropy bonus has no gradient",
        "trainer_core/model/vocab_parallel.py",
        '_step_with_entropy if ctx.entropy == "differentiated" else _step',
        "_step",
        _LOGITS,
    ),
    Mutant(
        "stale-weights-are-read",
        "weights are read while other replicas still hold the last update's",
        "trainer_core/model/model.py",
        "[chunk for chunk in self.chunks if chunk.ddp_config.overlap_param_gather]",
        "[]",
        _REENTRY,
    ),
    Mutant(
        "buffers-stay-the-references",
        "a reference that was in place leaves its buffers behind",
        "trainer_core/model/model.py",
        "            for held in (part._parameters, part._buffers)\n",
        "            for held in (part._parameters,)\n",
        _REENTRY,
    ),
    Mutant(
        "setting-not-read-back",
        "a setting of Megatron that did not take effect goes unnoticed",
        "trainer_core/model/effective.py",
        "    if held != wanted:\n",
        "    if False:\n",
        _EFFECTIVE,
    ),
)
