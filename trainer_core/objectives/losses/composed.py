"""The loss that a configuration asks for."""

from collections.abc import Mapping

import torch

from trainer_core.model.segments import Segments
from trainer_core.model.token_loss import TokenLoss
from trainer_core.objective_config import PolicyConfig
from trainer_core.objectives.losses.cispo import clipped_weight_loss
from trainer_core.objectives.losses.clip import clipped_surrogate
from trainer_core.objectives.losses.correction import importance_weights
from trainer_core.objectives.losses.gspo import sequence_surrogate
from trainer_core.objectives.losses.kl import kl_estimate
from trainer_core.objectives.losses.likelihood import likelihood_loss
from trainer_core.objectives.losses.log_ratio import log_ratio
from trainer_core.objectives.losses.preference import preference_loss

Values = Mapping[str, torch.Tensor]
"""(R,) values of response tokens by name:

advantages: or with DPO the coefficients of `preference_loss`;
losses: with DPO;
old_logprobs: what the ratio divides by. Without them the current ones, as before the first update: the ratio is 1, and
its gradient that of logprobs;
behaviour_logprobs: by the policy that drew the tokens, if there is a correction;
reference_logprobs: if there is a reference.
"""


def policy_loss(
    policy: PolicyConfig, logprobs: torch.Tensor, entropy: torch.Tensor, values: Values, segments: Segments
) -> TokenLoss:
    """The policy loss, plus KL to the reference, minus the entropy bonus, per response token; all (R,) float32.

    All log-ratios are clamped to +-LOG_RATIO_LIMIT, beyond which no gradient flows.
    """
    result = _corrected(policy, _main(policy, logprobs, values, segments), logprobs, values, segments)
    loss = result.loss
    if policy.kl_coefficient and policy.kl_in == "loss" and "reference_logprobs" in values:
        ratio = log_ratio(values["reference_logprobs"], logprobs)
        loss = loss + policy.kl_coefficient * kl_estimate(ratio, policy.kl_estimator)
    if policy.entropy_coefficient:
        loss = loss - policy.entropy_coefficient * entropy
    return TokenLoss(loss, result.clipped)


def _main(policy: PolicyConfig, logprobs: torch.Tensor, values: Values, segments: Segments) -> TokenLoss:
    kind = policy.loss
    if kind.type == "sft":
        return likelihood_loss(logprobs)
    advantages = values["advantages"]
    if kind.type == "dpo":
        return preference_loss(logprobs, advantages, values["losses"])
    change = log_ratio(logprobs, values.get("old_logprobs", logprobs.detach()))
    if kind.type == "gspo":
        return sequence_surrogate(change, advantages, segments, kind.clip_low, kind.clip_high)
    ratio = torch.exp(change)
    if kind.type == "cispo":
        return clipped_weight_loss(ratio, logprobs, advantages, kind.clip_low, kind.clip_high)
    return clipped_surrogate(ratio, advantages, policy.clip_low, policy.clip_high, kind.dual_limit)


def _corrected(
    policy: PolicyConfig, result: TokenLoss, logprobs: torch.Tensor, values: Values, segments: Segments
) -> TokenLoss:
    if policy.correction.type == "none":
        return result
    before = values.get("old_logprobs", logprobs.detach())
    weights = importance_weights(policy.correction, before, values["behaviour_logprobs"], segments)
    return TokenLoss(result.loss * weights, result.clipped)
