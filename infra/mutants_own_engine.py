"""Faults in engines of a user's own that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_OWN = ("tests/tasks/engine/test_own.py",)
_CONFIG = ("tests/tasks/config/test_engine.py",)

OWN_ENGINE = (
    Mutant(
        "engine-source-not-recorded",
        "the source of an engine is not part of a run's meaning",
        "tasks/config/document.py",
        '    if "engine" in document:\n',
        "    if False:\n",
        _CONFIG,
    ),
    Mutant(
        "engine-source-runtime",
        "the source of an engine may change between rollouts of a run",
        "tasks/config/run.py",
        '    source: Annotated[str, _SAMPLES] = Field(default="", exclude_if=operator.not_)\n',
        '    source: Annotated[str, RUNTIME] = Field(default="", exclude_if=operator.not_)\n',
        _CONFIG,
    ),
    Mutant(
        "own-engine-lacks-methods",
        "an engine that lacks a method of the protocol is found out in the middle of a run",
        "tasks/engine/own.py",
        "(found := inspect.getattr_static(kind, name, None)) is None or found is method:\n",
        "(found := inspect.getattr_static(kind, name, None)) is False:\n",
        _OWN,
    ),
    Mutant(
        "own-engine-other-signature",
        "a method with another signature is found out in the middle of a run",
        "tasks/engine/own.py",
        "(head := mismatch(found, *inspect.signature(method).parameters)) is not None:",
        "(head := mismatch(found, *inspect.signature(found).parameters)) is not None:",
        _OWN,
    ),
    Mutant(
        "own-engine-answers-unchecked",
        "what an engine of the user's own answers is stored as it is",
        "tasks/engine/own.py",
        "        if flaw is not None:\n",
        "        if False:\n",
        _OWN,
    ),
    Mutant(
        "own-engine-not-finite",
        "log-probabilities that are not finite are stored",
        "tasks/engine/own.py",
        "    if not np.isfinite(logprobs.flatten().to_numpy()).all():\n",
        "    if False:\n",
        _OWN,
    ),
    Mutant(
        "own-engine-half-written",
        "an engine goes on to sample with weights that arrived in part",
        "tasks/engine/base.py",
        '                self._unusable = "a weight update began and did not finish"\n',
        "",
        _OWN,
    ),
    Mutant(
        "own-engine-changed-weights",
        "parameters that changed after the commit count as those that were committed",
        "tasks/engine/base.py",
        "name: arrived if now[name] == self._landed[name] else now[name] for name",
        "name: arrived for name",
        _OWN,
    ),
    Mutant(
        "own-engine-keeps-dropped",
        "requests that an update drops are sampled under the new weights",
        "tasks/engine/base.py",
        '        if in_flight != "keep":\n',
        "        if False:\n",
        _OWN,
    ),
    Mutant(
        "own-engine-other-plan",
        "weights of another shape are written into an engine's parameters",
        "tasks/engine/base.py",
        "        self._check_plan(made)\n",
        "",
        _OWN,
    ),
)
