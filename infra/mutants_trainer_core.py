"""Faults in what a trainer is told, holds and lets others see, that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_DIGEST = ("tests/trainer_core/weights/test_digest.py",)
_REPLAY = ("tests/trainer_core/model/test_replay.py",)
_EFFECTIVE = ("tests/trainer_core/model/test_effective.py",)
_LAYOUTS = "tests/trainer_core/model/test_layouts.py::test_the_gradient_does_not_depend_on_the_layout"
_PADDING = ("tests/trainer_core/model/test_padding.py",)
_REENTRY = "tests/trainer_core/model/test_reentry.py::test_"
_SHARING = ("tests/trainer_core/batches/test_sharing.py",)
_CHECKPOINT = ("tests/trainer_core/state/test_checkpoint.py::test_virtual_stages_are_no_part_of_a_state",)

TRAINER_CORE = (
    Mutant(
        "virtual-stages-exchange-in-batches",
        "two ranks with virtual stages exchange both directions in one batch, which mixes them up",
        "trainer_core/model/settings.py",
        '        "batch_p2p_comm": virtual is None,\n        "overlap_p2p_comm": virtual is not None,\n',
        '        "batch_p2p_comm": True,\n        "overlap_p2p_comm": False,\n',
        (f"{_LAYOUTS}[pp2-vpp2-tied]",),
    ),
    Mutant(
        "any-number-of-micro-batches",
        "the number of micro-batches is not rounded up for the interleaved schedule",
        "trainer_core/batches/sharing.py",
        "    return -(-number // multiple) * multiple\n",
        "    return number\n",
        _SHARING,
    ),
    Mutant(
        "one-chunk-is-saved",
        "of virtual stages only the first is saved",
        "trainer_core/state/shards.py",
        "for module in model.modules]",
        "for module in model.modules[:1]]",
        _CHECKPOINT,
    ),
    Mutant(
        "virtual-stages-in-the-state",
        "a state records virtual stages, so that the same ranks without them get new generators",
        "trainer_core/trainer.py",
        "restore_rng = facts.parallel == self._config.parallel.ranks\n",
        "restore_rng = facts.parallel == self._config.parallel\n",
        _CHECKPOINT,
    ),
    Mutant(
        "recorded-batch-again",
        "a recorded micro-batch is launched again with its own samples instead of the next ones",
        "trainer_core/model/replay.py",
        "            own.copy_(given)\n",
        "            own.copy_(own)\n",
        _REPLAY,
    ),
    Mutant(
        "recorded-reports-are-one",
        "what recorded micro-batches report is overwritten by the next one",
        "trainer_core/model/replay.py",
        "reports.append({name: value.clone() for name, value in recorded.items()})",
        "reports.append(recorded)",
        _REPLAY,
    ),
    Mutant(
        "recorded-tokens-of-one",
        "gradients of recorded micro-batches are divided by the tokens of one of them",
        "trainer_core/model/passes.py",
        "torch.stack([batch.count for batch in batches]).sum(dtype=torch.int32)",
        "batches[0].count",
        _REPLAY,
    ),
    Mutant(
        "recorded-are-reduced-each",
        "gradients of recorded micro-batches are reduced after each of them",
        "trainer_core/model/model.py",
        "self.config.finalize_model_grads_func, None\n",
        "self.config.finalize_model_grads_func, self.config.finalize_model_grads_func\n",
        _REPLAY,
    ),
    Mutant(
        "filling-counts",
        "what fills micro-batches up to one shape counts as response tokens",
        "trainer_core/batches/flat.py",
        "responses=np.append(batch.responses, zeros - 1)",
        "responses=np.append(batch.responses, zeros)",
        (*_REPLAY, "tests/trainer_core/batches/test_flat.py"),
    ),
    Mutant(
        "fusion-is-dropped",
        "gradient_accumulation_fusion is accepted and has no effect",
        "trainer_core/model/model.py",
        "    fuse_accumulation(built, config.megatron)\n",
        "",
        _EFFECTIVE,
    ),
    Mutant(
        "experts-as-the-bridge-likes",
        "the auxiliary loss that megatron-bridge switches on stays on",
        "trainer_core/model/settings.py",
        '            "moe_aux_loss_coeff": config.auxiliary_loss,\n',
        '            "moe_aux_loss_coeff": provider.moe_aux_loss_coeff,\n',
        _EFFECTIVE,
    ),
    Mutant(
        "optimizer-not-read-back",
        "Adam's first decay is not what was asked for",
        "trainer_core/model/optimizer.py",
        "        adam_beta1=config.beta1,\n",
        "        adam_beta1=0.9,\n",
        _EFFECTIVE,
    ),
    Mutant(
        "readers-may-write",
        "what may only read weights can change them",
        "trainer_core/model/model.py",
        '        if access == "readable" and self._versions() != before:\n',
        "        if False:\n",
        (f"{_REENTRY}what_may_only_read_cannot_write",),
    ),
    Mutant(
        "failed-update-moves-buffers",
        "an update that is refused leaves moved buffers",
        "trainer_core/model/model.py",
        "                    buffer.copy_(value)\n",
        "                    pass\n",
        (f"{_REENTRY}an_update_that_fails_leaves_buffers_as_they_were",),
    ),
    Mutant(
        "hooks-stay-off",
        "after weights were read, updated ones are no longer gathered before the forward pass",
        "trainer_core/model/model.py",
        "                chunk.enable_forward_pre_hook()\n",
        "                pass\n",
        (f"{_REENTRY}overlap_changes_no_bit_in_any_order_of_events[dp2-1-both]",),
    ),
    Mutant(
        "gradients-not-finalized",
        "gradients are not reduced over replicas and tied embeddings",
        "trainer_core/model/model.py",
        "    provider.finalize_model_grads_func = finalize_model_grads\n",
        "",
        (f"{_LAYOUTS}[dp2-tied]",),
    ),
    Mutant(
        "padding-is-stored",
        "a state holds the padding of the vocabulary, so that it depends on the layout",
        "trainer_core/state/boxes.py",
        "            inside = region.overlap(content)\n",
        "            inside = region\n",
        _PADDING,
    ),
    Mutant(
        "first-gradient-since-the-flow-began",
        "the time to the first gradient of ranks that replace others begins with the flow's process",
        "tasks/workers/trainers.py",
        "time.time() if replaces else",
        "time.time() if False else",
        ("tests/tasks/stages/test_train.py",),
    ),
    Mutant(
        "digest-without-place",
        "every chunk of a digest counts its words from the same place, so that two chunks can be swapped unseen",
        "trainer_core/weights/digest.py",
        "_signed(start * _K1), out=x)",
        "_signed(0 * _K1), out=x)",
        _DIGEST,
    ),
    Mutant(
        "digest-kernel-without-the-end",
        "on a card the bytes after the last whole word of a tensor are not part of its digest",
        "trainer_core/weights/digest_kernel.py",
        "(nbytes + 7) // 8)",
        "nbytes // 8)",
        _DIGEST,
    ),
    Mutant(
        "digest-kernel-forgets-the-stride",
        "on a card the columns of a matrix are read as if they lay one after another",
        "trainer_core/weights/digest_kernel.py",
        "(at // row) * stride",
        "(at // row) * row * 8",
        _DIGEST,
    ),
)
