"""Faults in the engine and in how work is dealt to engines that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_SERVING = ("tests/tasks/engine/test_serving.py",)
_DEALING = ("tests/tasks/workers/test_sampling.py",)

ENGINE = (
    Mutant(
        "batches-share-steps",
        "where results must repeat, requests of one batch are computed beside those of another",
        "tasks/engine/engine.py",
        "        while self._waiting and not (self._spec.together and self._running):\n",
        "        while self._waiting:\n",
        _SERVING,
    ),
    Mutant(
        "old-requests-under-new-weights",
        "requests that were under way go on when the weights change",
        "tasks/engine/engine.py",
        "        self.drop()\n        self._held = Unusable(",
        "        self._held = Unusable(",
        _SERVING,
    ),
    Mutant(
        "requests-run-on",
        "what is dropped is still computed",
        "tasks/engine/engine.py",
        "            self._core.forget(list(self._running))\n",
        "",
        _SERVING,
    ),
    Mutant(
        "engine-listens-everywhere",
        "the process group of an engine accepts connections on every interface",
        "tasks/engine/inside.py",
        '    handlers["tcp"] = _met\n',
        "",
        _SERVING,
    ),
    Mutant(
        "answers-of-an-earlier-caller",
        "what an earlier attempt queued is taken for the answer to this one",
        "tasks/workers/sampling.py",
        "            engine.drop()  # what",
        "            pass  # what",
        _DEALING,
    ),
    Mutant(
        "first-engine-first",
        "batches go to the first engine, not to the one with least in flight",
        "tasks/workers/sampling.py",
        "            place = min(self._given, key=self._in_flight)\n",
        "            place = min(self._given)\n",
        _DEALING,
    ),
    Mutant(
        "no-engine-no-error",
        "a rollout ends without its samples when the last engine is lost",
        "tasks/workers/sampling.py",
        "            return bool(self._given)\n",
        "            return True\n",
        _DEALING,
    ),
    Mutant(
        "work-counted-twice",
        "samples that a lost engine had done count beside those done again",
        "tasks/workers/sampling.py",
        "            self._partial.pop(place)\n",
        "",
        _DEALING,
    ),
    Mutant(
        "no-deadline-for-steps",
        "an engine that hangs is waited for as long as for a whole training",
        "tasks/workers/engines.py",
        ".wait(self.deadlines.step_deadline_s)",
        ".wait(self.deadlines.call_deadline_s)",
        _DEALING,
    ),
    Mutant(
        "one-engine-evaluates",
        "an evaluation leaves all engines idle but one",
        "tasks/workers/sampling.py",
        "math.ceil(len(batch.prompts) / len(engines))",
        "len(batch.prompts)",
        _DEALING,
    ),
    Mutant(
        "engines-do-not-sleep",
        "engines keep the card's memory while the trainer trains, whatever `engine.sleep` says",
        "tasks/stages/train.py",
        "    rest(context, prepared)\n",
        "",
        ("tests/tasks/stages/test_train.py",),
    ),
    Mutant(
        "scheduler-is-no-victim",
        "prove-resume does not know the processes that vLLM starts for an engine",
        "flows/proof/kills.py",
        "if several or engine.own_process else 0",
        "if False else 0",
        ("tests/flows/proof/test_kills.py",),
    ),
)
