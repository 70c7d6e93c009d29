"""Faults of the weight sync as a transaction: each must be noticed by the quick tests. See `infra.mutants`."""

from infra.mutants_known import Mutant

_TRANSACTION = ("tests/tasks/stages/test_transaction.py",)
_SERVED = ("tests/tasks/stages/test_served_weights.py", "tests/tasks/stages/test_transaction.py")
_PROBE = ("tests/tasks/stages/test_probe.py",)
_FILE = "tasks/stages/transaction.py"

SYNC = (
    Mutant(
        "commit-before-proof",
        "engines serve new weights before these are verified",
        _FILE,
        "        digests = proven(plan, sent, arrived, expected)\n",
        "        self._commit(version, weights_digest(next(iter(arrived.values())).digests))\n"
        "        digests = proven(plan, sent, arrived, expected)\n",
        _TRANSACTION,
    ),
    Mutant(
        "commit-of-the-first-engine",
        "only the first engine commits",
        _FILE,
        "        for engine in self.engines.values():\n            engine.commit_update",
        "        for engine in list(self.engines.values())[:1]:\n            engine.commit_update",
        _TRANSACTION,
    ),
    Mutant(
        "commits-not-checked",
        "nobody looks at what the engines serve after the commit",
        _FILE,
        "            if (held := engine.identity()) != committed:\n",
        "            if (held := committed) != committed:\n",
        _TRANSACTION,
    ),
    Mutant(
        "abort-not-sent",
        "after a failure the engines are left in the middle of the update",
        _FILE,
        "            update.abort(error)\n            raise\n",
        "            raise\n",
        _TRANSACTION,
    ),
    Mutant(
        "death-told-as-mismatch",
        "the first error is raised, also if the loss of a process explains it, so the stage is not tried again",
        _FILE,
        "        raise next((one for one in failures if isinstance(one, WorkerLost)), failures[0])\n",
        "        raise min(failures, key=lambda one: isinstance(one, WorkerLost))\n",
        _TRANSACTION,
    ),
    Mutant(
        "digests-not-compared",
        "digests of what was sent and what arrived are not compared",
        "tasks/stages/proof.py",
        "    if wrong := differing(sent, arrived):\n",
        "    if wrong := differing(sent, sent):\n",
        _TRANSACTION,
    ),
    Mutant(
        "names-not-compared",
        "a tensor that did not arrive is not missed",
        "tasks/stages/proof.py",
        '    _check_names(sent, arrived, "sent", f"received by engine {engine}")\n'
        "    if wrong := differing(sent, arrived):\n",
        "    if wrong := [name for name in sent if arrived.get(name, sent[name]) != sent[name]]:\n",
        _TRANSACTION,
    ),
    Mutant(
        "ranks-may-disagree",
        "the plans of trainer ranks are not compared",
        "tasks/stages/proof.py",
        "        if one.digest != digest:\n",
        "        if one.digest != one.digest:\n",
        _TRANSACTION,
    ),
    Mutant(
        "plan-of-another-version",
        "a plan that leads to another version is carried out",
        "tasks/stages/proof.py",
        "    if plan is None or plan_digest(plan) != digest or plan.version != version:\n",
        "    if plan is None or plan_digest(plan) != digest:\n",
        _TRANSACTION,
    ),
    Mutant(
        "recorded-digest-not-compared",
        "weights that are served again are not compared with those that were recorded",
        "tasks/stages/proof.py",
        "    if expected not in (None, found):\n",
        "    if expected not in (None, found, expected):\n",
        _SERVED,
    ),
    Mutant(
        "stored-weights-not-used",
        "a new engine gets what the trainer ranks happen to hold",
        "tasks/stages/served_weights.py",
        "            deliver(context, lacking, group, version, expected, folder)\n",
        "            deliver(context, lacking, group, version, expected)\n",
        _SERVED,
    ),
    Mutant(
        "serving-after-a-failed-probe",
        "engines go on serving weights that failed the probe",
        "tasks/stages/weight_sync.py",
        "            refuse(self._engines, str(error))\n            raise\n",
        "            raise\n",
        _PROBE,
    ),
    Mutant(
        "any-version-is-used",
        "samples of another weight version are used",
        "tasks/workers/sampling.py",
        "        if self._version not in (None, batch.weight_version):\n",
        "        if self._version not in (None, self._version):\n",
        ("tests/tasks/workers/test_sampling.py",),
    ),
    Mutant(
        "check-sync-of-the-version",
        "check-sync compares versions and not weights",
        "tasks/sync_check.py",
        "    if found != served.weights_digest:\n",
        "    if found is None:\n",
        ("tests/tasks/test_sync_check.py",),
    ),
    Mutant(
        "check-sync-ends-engines",
        "check-sync ends an engine of a live run that does not answer",
        "tasks/workers/actors.py",
        '        """Ask no more."""\n        self._ended = True\n',
        '        """Ask no more."""\n        super().end()\n',
        ("tests/tasks/workers/test_actors.py",),
    ),
    Mutant(
        "update-outlives-its-call",
        "a weight update waits as long as the call, whose deadline ends the processes",
        "tasks/stages/transaction.py",
        "_SHARE * context.config.workers.call_deadline_s",
        "context.config.workers.call_deadline_s",
        ("tests/tasks/stages/test_transaction.py",),
    ),
)
