"""Faults in rollouts beside a training that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_KILLS = ("tests/faults/test_ahead.py",)
_MATRIX = ("tests/faults/test_matrix.py",)
_LOOP = ("tests/flows/test_ahead.py",)
_CHECKS = ("tests/tasks/test_checks.py",)

AHEAD = (
    Mutant(
        "newest-weights-for-a-rollout-ahead",
        "a rollout is sampled by whatever weights are served",
        "flows/iteration.py",
        "        now = before.served.weight_version == version\n",
        "        now = True\n",
        _KILLS,
    ),
    Mutant(
        "rollouts-ahead-draw-the-same-prompts",
        "each rollout draws the first prompts",
        "flows/iteration.py",
        "rollouts[-1] if rollouts else before.prepared",
        "before.prepared",
        (*_KILLS, *_LOOP),
    ),
    Mutant(
        "ahead-has-no-effect",
        "rollouts are sampled by the newest weights, one after the other",
        "flows/iteration.py",
        "return max(0, iteration - 1 - run.config.rollout.ahead)",
        "return iteration - 1",
        (*_KILLS, *_LOOP),
    ),
    Mutant(
        "engines-updated-under-a-rollout",
        "new weights reach the engines while a rollout that needs the old ones is in flight",
        "tasks/stages/beside.py",
        "                self._ended.result()\n",
        "                pass\n",
        (*_KILLS, *_LOOP),
    ),
    Mutant(
        "weights-of-a-rollout-ahead-retired",
        "retention deletes the state whose weights a lost rollout needs",
        "tasks/config/run.py",
        "max(newest, self.rollout.ahead + 1)",
        "newest",
        _KILLS,
    ),
    Mutant(
        "rerun-without-older-weights",
        "a rollout is asked to be done again whose weights are not kept",
        "storage/upkeep/redoing.py",
        "        for older in range(max(0, first), iteration):\n",
        "        for older in ():\n",
        _LOOP,
    ),
    Mutant(
        "fork-without-older-weights",
        "a fork begins without the weights that its first rollouts need",
        "storage/upkeep/fork.py",
        "range(iteration - older, iteration + 1)",
        "range(iteration, iteration + 1)",
        _LOOP,
    ),
    Mutant(
        "stored-pieces-sampled-again",
        "a continued rollout samples what is stored",
        "tasks/stages/rollout.py",
        "        kept = find_piece(self.work.writer, self._name(groups))\n",
        "        kept = None\n",
        _MATRIX,
    ),
    Mutant(
        "rollout-ahead-takes-the-training-ranks",
        "a rollout whose engine was lost takes trainer ranks that train",
        "tasks/stages/served_weights.py",
        "        with context.turn:\n            _bring(",
        "        if True:\n            _bring(",
        ("tests/tasks/stages/test_beside.py",),
    ),
    Mutant(
        "rollout-goes-on-after-a-failed-training",
        "a rollout beside a training that failed is not stopped",
        "tasks/stages/beside.py",
        "        if self._stopped.is_set():\n",
        "        if False:\n",
        ("tests/tasks/stages/test_beside.py",),
    ),
    Mutant(
        "outbox-with-two-threads",
        "two threads that add a first job at once each start a thread of the outbox",
        "storage/write_behind.py",
        "        with self._adding:\n            if self.idle",
        "        if True:\n            if self.idle",
        ("tests/storage/test_write_behind.py",),
    ),
    Mutant(
        "older-weights-without-correction",
        "samples of older weights are trained on as if they were of the newest",
        "tasks/checks.py",
        "    if policy.needs_advantages and not policy.needs_behaviour:\n",
        "    if False:\n",
        _CHECKS,
    ),
    Mutant(
        "pairs-of-older-weights",
        "DPO pairs are sampled ahead",
        "tasks/checks.py",
        "    if policy.loss.paired:\n        raise InputError(\n            f'{older}",
        "    if False:\n        raise InputError(\n            f'{older}",
        _CHECKS,
    ),
    Mutant(
        "ahead-without-room",
        "engines that sleep while the trainer trains are to sample meanwhile",
        "tasks/checks.py",
        "    if turns is not None:\n",
        "    if False:\n",
        _CHECKS,
    ),
    Mutant(
        "ahead-on-a-card-that-is-too-small",
        "a rank and engines that one card cannot hold begin to start side by side",
        "tasks/workers/room.py",
        "    if of_rank + of_engines <= card_bytes:\n",
        "    if True:\n",
        ("tests/tasks/workers/test_room.py",),
    ),
    Mutant(
        "head-without-older-weights",
        "a head is chosen whose next rollouts need weights that are not kept",
        "storage/upkeep/redoing.py",
        "        if sampled and (sampled, workflow.samples) not in done:\n",
        "        if False:\n",
        _LOOP,
    ),
)
