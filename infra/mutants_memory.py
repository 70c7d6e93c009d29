"""Faults in freeing and restoring a trainer's memory that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_FILE = "trainer_core/model/memory.py"
_MEMORY = ("tests/trainer_core/model/test_memory.py",)
_TURNS = ("tests/tasks/stages/test_turns.py",)

MEMORY = (
    Mutant(
        "main-weights-no-longer-views",
        "the optimizer's state gets new tensors, as by Megatron's offload_to_cpu, and the model keeps the old ones",
        _FILE,
        "            freed += self._optimizer.release(self._optimizer_storages())\n",
        "            for one in self._of_optimizer():\n"
        "                one.data = one.data.clone()\n"
        "            freed += self._optimizer.release(self._optimizer_storages())\n",
        _MEMORY,
    ),
    Mutant(
        "reload-not-waited-for",
        "what was given up is used before its bytes have arrived",
        _FILE,
        "        if self._away:\n            torch.cuda.synchronize()",
        "        if not self._away:\n            torch.cuda.synchronize()",
        _MEMORY,
    ),
    Mutant(
        "given-up-before-it-was-copied",
        "memory is given up while it is still being copied to the host",
        _FILE,
        "        torch.cuda.synchronize()  # the copies must have been made before the storages are freed\n",
        "",
        _MEMORY,
    ),
    Mutant(
        "pending-gradients-dropped",
        "gradients of an update that was not taken are dropped",
        _FILE,
        "        if wanted.drop_gradients and self.accumulating:\n",
        "        if False:\n",
        _MEMORY,
    ),
    Mutant(
        "failed-update-stays-pending",
        "after an update that was refused, gradients can never be dropped again",
        "trainer_core/model/model.py",
        "            self.residence.accumulating = False  # these gradients are never used\n",
        "",
        _MEMORY,
    ),
    Mutant(
        "frozen-weights-stay",
        "frozen parameters, which are in no buffer, are not given up",
        _FILE,
        "for parameter in chunk.module.parameters())",
        "for parameter in chunk.module.parameters() if parameter.requires_grad)",
        _MEMORY,
    ),
    Mutant(
        "weights-read-while-away",
        "weights are exported and saved while they are on the host",
        "trainer_core/model/model.py",
        '        self.residence.resume("parameters")\n        overlapped',
        "        overlapped",
        _MEMORY,
    ),
    Mutant(
        "moments-saved-while-away",
        "a state is saved while the optimizer's state is on the host",
        "trainer_core/model/optimizer.py",
        '        self._residence.resume("optimizer")\n',
        "",
        _MEMORY,
    ),
    Mutant(
        "gradients-into-nothing",
        "a pass begins without gradient buffers",
        "trainer_core/model/model.py",
        '        self.residence.resume("gradients")\n',
        "",
        _MEMORY,
    ),
    Mutant(
        "host-memory-each-time",
        "memory on the host is reserved each time",
        _FILE,
        "        if self._host.nbytes < size:\n",
        "        if True:\n",
        _MEMORY,
    ),
    Mutant(
        "weights-given-up-before-the-export",
        "weights leave the device before they are exported",
        "tasks/stages/held_state.py",
        "    if not weights:\n",
        "    if False:\n",
        _TURNS,
    ),
    Mutant(
        "engines-sample-beside-the-trainer",
        "engines sample while new trainer ranks hold all their memory",
        "tasks/stages/served_weights.py",
        "    release(context, trainers(context, prepared))\n",
        "    trainers(context, prepared)\n",
        _TURNS,
    ),
    Mutant(
        "engines-start-beside-the-trainer",
        "engines that take turns with the trainer are started while it holds all its memory",
        "tasks/stages/held_state.py",
        "    if context.config.retrain is None and not config.memory.in_use:\n",
        "    if context.config.retrain is None:\n",
        _TURNS,
    ),
    Mutant(
        "engines-that-sleep-start-beside-the-trainer",
        "engines that will sleep are started beside new trainer ranks, which hold weights and gradients",
        "tasks/stages/train.py",
        "work.config.warmup, work.config.train.memory.in_use\n",
        "work.config.warmup, False\n",
        _TURNS,
    ),
)
