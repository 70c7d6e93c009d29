"""A trial of an objective on a few made-up tokens, before a run starts.

As a program it reads the objective (`PolicyConfig`, JSON) from standard input and writes the refusal, if there is one,
to standard output. The code of the user's own may write elsewhere only."""

import contextlib
import sys

import numpy as np
import torch

from storage.errors import InputError, RatchetError
from trainer_core.objectives.advantages import token_advantages
from trainer_core.objectives.loss_config import UserLoss
from trainer_core.objectives.losses import policy_loss
from trainer_core.objectives.objective_config import PolicyConfig
from trainer_core.objectives.registry import loss_of
from trainer_core.objectives.scored import ScoredSamples
from trainer_core.objectives.tokens import Segments, Tokens
from trainer_core.user_code import without_folder

_LENGTHS = np.array([3, 1, 2, 4, 2, 3])
_GROUPS = np.array([0, 0, 0, 1, 1, 1], dtype=np.int32)
_REWARDS = np.array([1.0, 0.0, 0.25, 0.0, np.nan, 1.0], dtype=np.float32)


def try_objective(policy: PolicyConfig) -> None:
    """Compute advantages, loss and gradient of six samples in two groups, one of them without a reward. Raises
    InputError: code of the user's own fails, or returns something unusable. Raises NumericsError: a value is not
    finite."""
    generator = torch.Generator().manual_seed(0)
    count = int(_LENGTHS.sum())
    logprobs, *others = (-torch.rand(count, generator=generator) - 0.01 for _ in range(4))
    names = ("old_logprobs", "behaviour_logprobs", "reference_logprobs")
    known = dict(zip(names, others, strict=True)) | {"entropy": torch.rand(count, generator=generator)}
    needed = {
        "old_logprobs": True, "behaviour_logprobs": policy.weighs_behaviour,
        "reference_logprobs": policy.needs_reference, "entropy": policy.needs_entropy,
    }  # fmt: skip
    values = {name: value for name, value in known.items() if needed[name]}
    if policy.needs_advantages:
        scored = ScoredSamples(_REWARDS, _GROUPS, np.isfinite(_REWARDS), _LENGTHS)
        penalties = np.full(count, 0.01) if policy.kl_in == "reward" else None
        values["advantages"] = torch.from_numpy(token_advantages(policy, scored, penalties))
    tokens = Tokens(logprobs.requires_grad_(), Segments(torch.from_numpy(_LENGTHS)), values)
    policy = policy.model_copy(update={"distill": None})  # no code of the user's own sees a teacher's tokens
    policy_loss(policy, loss_of(policy), tokens).loss.sum().backward()
    if logprobs.grad is None or not torch.isfinite(logprobs.grad).all():
        given = "no gradient" if logprobs.grad is None else "a gradient that is not finite"
        code = f".function {without_folder(policy.loss.function)!r}" if isinstance(policy.loss, UserLoss) else ""
        raise InputError(
            f"train.policy.loss{code} gives tokens.logprobs {given}: compute the loss from tokens.logprobs"
        )


def main() -> None:
    policy = PolicyConfig.model_validate_json(sys.stdin.read())
    try:
        with contextlib.redirect_stdout(sys.stderr):
            try_objective(policy)
    except RatchetError as error:
        sys.stdout.write(str(error))


if __name__ == "__main__":
    main()
