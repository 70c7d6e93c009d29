"""Faults in the states of trainers that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_STATE = (
    "tests/trainer_core/state/test_content.py",
    "tests/trainer_core/state/test_files.py",
    "tests/trainer_core/state/test_checkpoint.py",
    "tests/trainer_core/state/test_saving.py",
)
_EXPORT = ("tests/tasks/export",)

STATES = (
    Mutant(
        "state-file-becomes-a-part",
        "the store takes a file as a part that the next save changes",
        "trainer_core/state/files.py",
        "    os.link(path, second)\n",
        "",
        _STATE,
    ),
    Mutant(
        "state-fact-becomes-a-part",
        "a small file of a state that has become a part is written over",
        "trainer_core/state/files.py",
        "    path.unlink(missing_ok=True)\n    path.write_bytes(content)\n",
        "    path.write_bytes(content)\n",
        _STATE,
    ),
    Mutant(
        "pin-error-stays",
        "the next kernel reports that memory could not be pinned",
        "trainer_core/platform/pinning.py",
        "            self.forget()\n        elif code:",
        "            pass\n        elif code:",
        ("tests/trainer_core/state/test_files.py",),
    ),
    Mutant(
        "pin-or-fail",
        "a state cannot be saved where its memory cannot be pinned",
        "trainer_core/platform/pinning.py",
        "_NOT_HERE = (1, 2, 801)",
        "_NOT_HERE = ()",
        ("tests/trainer_core/state/test_files.py",),
    ),
    Mutant(
        "room-not-reserved",
        "a file of a state is mapped without room for it",
        "trainer_core/state/files.py",
        "        os.posix_fallocate(file.fileno(), 0, size)\n",
        "        file.truncate(size)\n",
        _STATE,
    ),
    Mutant(
        "positions-in-the-shard",
        "the identity mixes elements with their positions in the shard",
        "trainer_core/state/content.py",
        "    positions = box.positions(first, values.numel(), values.device)\n",
        "    positions = torch.arange(values.numel(), device=values.device)\n",
        _STATE,
    ),
    Mutant(
        "owners-not-counted",
        "a state is saved whatever shards the ranks own",
        "trainer_core/state/content.py",
        "        if elements != _elements(shape):\n",
        "        if elements < 0:\n",
        _STATE,
    ),
    Mutant(
        "padding-not-checked",
        "a state is saved whatever the padding of its vocabulary holds",
        "trainer_core/state/content.py",
        "        if padding:\n",
        "        if padding < 0:\n",
        _STATE,
    ),
    Mutant(
        "generators-not-identified",
        "the random generators are not part of a state's identity",
        "trainer_core/state/content.py",
        "generators=value_digest([facts.layout(), words]),",
        "generators=value_digest([facts.layout()]),",
        _STATE,
    ),
    Mutant(
        "adam-counts-from-zero",
        "Adam's counters start again when a state is loaded",
        "trainer_core/model/optimizer.py",
        '                    state["step"] = torch.tensor(float(updates))\n',
        '                    state["step"] = torch.tensor(0.0)\n',
        _STATE,
    ),
    Mutant(
        "adam-counters-shared",
        "all parameters share one counter of updates, which each of them advances",
        "trainer_core/model/optimizer.py",
        '                    state["step"] = torch.tensor(float(updates))\n',
        '                    state["step"] = next(iter(part.optimizer.state.values()))["step"].fill_(float(updates))\n',
        _STATE,
    ),
    Mutant(
        "schedule-from-the-start",
        "the learning rate starts again when a state is loaded",
        "trainer_core/model/optimizer.py",
        "        self.schedule.step(updates)\n",
        "",
        _STATE,
    ),
    Mutant(
        "export-mixes-gate-and-up",
        "gate and up projection change places in an export",
        "trainer_core/hugging_face.py",
        "    return tuple(fused.chunk(2))\n",
        "    return tuple(reversed(fused.chunk(2)))\n",
        _EXPORT,
    ),
)
