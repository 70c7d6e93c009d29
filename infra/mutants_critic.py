"""Faults in a critic that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_CORE = ("tests/trainer_core/phases/test_critic.py",)
_GAE = ("tests/trainer_core/objectives/test_advantages.py",)
_LOOP = ("tests/flows/test_critic.py",)
_ADVANTAGES, _CRITIC = "trainer_core/objectives/advantages.py", "trainer_core/phases/critic.py"

CRITIC = (
    Mutant(
        "value-behind-the-last-token",
        "the last token of a response sees the first value of the next response",
        _ADVANTAGES,
        "    following[last] = 0.0\n",
        "",
        _GAE,
    ),
    Mutant(
        "advantages-without-lambda",
        "later errors count fully, whatever gae_lambda is",
        _ADVANTAGES,
        "found[places] += gamma * gae_lambda * found[places + 1]",
        "found[places] += gamma * found[places + 1]",
        _GAE,
    ),
    Mutant(
        "returns-of-normalized-advantages",
        "a critic learns returns without its own values",
        _ADVANTAGES,
        "policy.advantage.gae_lambda) + scored.values)",
        "policy.advantage.gae_lambda))",
        _GAE,
    ),
    Mutant(
        "values-clipped-in-favour",
        "the smaller of both errors is minimised, so that a clipped value has no pull back",
        "trainer_core/objectives/losses.py",
        "TokenLoss(torch.maximum(error, limited)",
        "TokenLoss(torch.minimum(error, limited)",
        _CORE,
    ),
    Mutant(
        "values-begin-with-noise",
        "a critic begins with an output layer of noise",
        _CRITIC,
        "                        tensor.zero_()\n",
        "                        tensor.normal_()\n",
        _CORE,
    ),
    Mutant(
        "critic-begins-anywhere",
        "a critic does not begin with the policy's weights",
        _CRITIC,
        "tensor.copy_(given[name])",
        "tensor.copy_(given[name] * 1.01)",
        _CORE,
    ),
    Mutant(
        "policy-learns-from-a-new-critic",
        "the policy does not wait for a critic's updates alone",
        _CRITIC,
        "return self.optimizer.updates < self._config.updates_alone",
        "return False",
        _CORE,
    ),
    Mutant(
        "critic-without-its-moments",
        "a loaded critic begins Adam and its schedule again",
        _CRITIC,
        "load_state(directory, self.model, self._optimizer, self._mesh",
        "load_state(directory, self.model, Optimizer(self.model, self._config.optimizer), self._mesh",
        _CORE,
    ),
    Mutant(
        "critic-not-identified",
        "the identity of a state does not depend on its critic",
        "trainer_core/state/facts.py",
        'return self.model_copy(update={"critic": digest})',
        "return self",
        _CORE,
    ),
    Mutant(
        "state-without-its-critic",
        "the files of a critic are not stored with the state",
        "trainer_core/trainer.py",
        'names, identity = [*names, *(f"{CRITIC}/{name}" for name in more)], identity.with_critic(digest)',
        "identity = identity.with_critic(digest if more else digest)",
        _CORE,
    ),
    Mutant(
        "fork-gets-a-critic",
        "a fork of a run without a critic may have one",
        "tasks/config/stored.py",
        "if (before.train.critic is None) != (config.train.critic is None):",
        "if before.train.critic is not None and config.train.critic is None:",
        _LOOP,
    ),
    Mutant(
        "no-room-for-a-critic",
        "the memory of a critic is not counted",
        "tasks/workers/room.py",
        "held = trained * (1 if config.train.critic is None else 2)",
        "held = trained",
        ("tests/tasks/workers/test_room.py",),
    ),
    Mutant(
        "no-room-for-a-teacher",
        "the memory of a teacher is not counted",
        "tasks/workers/room.py",
        "(parameters * held + teacher * weight)",
        "(parameters * held)",
        ("tests/tasks/workers/test_room.py",),
    ),
)
