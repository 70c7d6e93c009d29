"""Losses of response tokens, with correction, KL and entropy. All tensors are (R,) float32."""

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_core.batches.sequences import Samples, Vector
from trainer_core.objectives.loss_config import Correction, Level, MaskedCorrection, NoCorrection, TruncatedCorrection
from trainer_core.objectives.objective_config import DistillConfig, KlEstimator, PolicyConfig
from trainer_core.objectives.registry import Loss
from trainer_core.objectives.tokens import Segments, TokenLoss, Tokens, bounded_log_ratio


def policy_loss(policy: PolicyConfig, loss: Loss, tokens: Tokens) -> TokenLoss:
    """The loss, weighted by the correction, plus KL to a teacher and to the reference, minus the entropy bonus, per
    response token. All log-ratios are clamped to +-LOG_RATIO_LIMIT, beyond which no gradient flows."""
    nothing = torch.zeros_like(tokens.logprobs)
    result = TokenLoss(nothing, nothing) if policy.compares_alone else loss(tokens)
    total = result.loss
    if not isinstance(policy.correction, NoCorrection):
        old, behaviour = tokens.old_logprobs, tokens.behaviour_logprobs
        total = total * importance_weights(policy.correction, old, behaviour, tokens.responses)
    if policy.distill is not None and policy.compares_top:
        total = total + policy.distill.coefficient * top_divergence(
            tokens.values["top_own"], tokens.values["top_logprobs"]
        )
    if policy.kl_coefficient and policy.kl_in == "loss" and "reference_logprobs" in tokens.values:
        ratio = bounded_log_ratio(tokens.reference_logprobs, tokens.logprobs)
        total = total + policy.kl_coefficient * kl_estimate(ratio, policy.kl_estimator)
    if policy.entropy_coefficient:
        total = total - policy.entropy_coefficient * tokens.entropy
    return TokenLoss(total, result.clipped)


def clipped_surrogate(tokens: Tokens, clip_low: float, clip_high: float, dual_limit: float | None = None) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where A is negative at most -A dual_limit. Sources: PPO
    (arXiv 1707.06347) equation 7; two limits, "clip-higher", DAPO (arXiv 2503.14476) section 3.1; dual clip, Ye et al.,
    "Mastering complex control in MOBA games" (arXiv 1912.09729)."""
    return _surrogate(torch.exp(tokens.log_ratio), tokens.advantages, clip_low, clip_high, dual_limit)


def sequence_surrogate(tokens: Tokens, clip_low: float, clip_high: float) -> TokenLoss:
    """The clipped surrogate with one ratio for each sequence, s = exp(mean of the tokens' log-ratios).

    The loss of token t is max(-A_t s, -A_t clip(s, 1 - low, 1 + high)), its derivative by the token's own log-ratio
    -A_t s where nothing is clipped. Advantages may differ from token to token; where they do not, the mean over a
    sequence's tokens has the value and the gradient of the sequence's loss.

    Source: GSPO (arXiv 2507.18071) equations 5 and 7, GSPO-token, section 4.3."""
    log_ratio, responses = tokens.log_ratio, tokens.responses
    whole = responses.spread(responses.mean(log_ratio.detach()), len(log_ratio))  # (R,) -> (S,) -> (R,)
    return _surrogate(torch.exp(whole + (log_ratio - log_ratio.detach())), tokens.advantages, clip_low, clip_high)


def clipped_weight_loss(tokens: Tokens, clip_low: float, clip_high: float) -> TokenLoss:
    """-clip(r, 1 - clip_low, 1 + clip_high) A log-probability, in which the clipped ratio has no gradient.

    Every token keeps its gradient; `clipped` says where the weight is not the ratio.

    Source: CISPO, MiniMax-M1 (arXiv 2506.13585) equations 4 and 5."""
    ratio = torch.exp(tokens.log_ratio).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, (weight != ratio).float())


def likelihood_loss(tokens: Tokens) -> TokenLoss:
    """Negative log-likelihood of each token: supervised fine-tuning; on chosen samples, rejection sampling."""
    return TokenLoss(-tokens.logprobs, torch.zeros_like(tokens.logprobs))


def preference_loss(tokens: Tokens) -> TokenLoss:
    """A loss with the value `losses` and the derivatives -`coefficients` by the log-probabilities.
    `trainer_core.objectives.preference` finds both for the pairs of a mini-batch."""
    change = tokens.logprobs - tokens.logprobs.detach()
    return TokenLoss(tokens.values["losses"] - tokens.values["coefficients"] * change, torch.zeros_like(change))


def value_loss(values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float | None) -> TokenLoss:
    """(V - R)^2 / 2; with `clip` at least that of V clipped to within `clip` of its value before the updates. Source:
    the value loss of PPO in OpenAI's baselines (ppo2)."""
    error = (values - returns).square() / 2
    if clip is None:
        return TokenLoss(error, torch.zeros_like(error))
    # a value within the limits stays itself: old + (values - old) may be another one, by rounding, and count as clipped
    limited = (values.clamp(old - clip, old + clip) - returns).square() / 2
    return TokenLoss(torch.maximum(error, limited), (limited > error).float())


def top_divergence(own: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Reverse KL(policy || teacher) at each response token, in nats, over its k tokens and all others as one: (R, k)
    log-probabilities of the k by both -> (R,), with the gradient of the first. It is at most the KL over all tokens.

    Source: generalised knowledge distillation (arXiv 2306.13649), reverse KL on samples of the student. A teacher's
    tail that is left out instead biases the student: sparse logit sampling (arXiv 2503.16870)."""
    rest, theirs = (_rest(one) for one in (own, teacher))
    known = (own.exp() * bounded_log_ratio(own, teacher)).sum(-1)
    return known + rest * bounded_log_ratio(rest.log(), theirs.log())


def kl_estimate(log_ratio: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Estimate KL(q || p) at samples of q from log_ratio = log p(x) - log q(x), elementwise, in nats. k1 = -log r
    (unbiased, may be negative), k2 = (log r)^2 / 2 (biased), k3 = r - 1 - log r (unbiased, not negative). Source: J.
    Schulman, "Approximating KL divergence" (2020)."""
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio) - log_ratio


def importance_weights(
    correction: TruncatedCorrection | MaskedCorrection,
    trainer: torch.Tensor,
    behaviour: torch.Tensor,
    segments: Segments,
) -> torch.Tensor:
    """Weight of each response token's loss, without gradient.

    The ratio is rho = exp(trainer - behaviour), of the token, of its response (the product over its tokens) or their
    geometric mean. "truncate" gives min(rho, limit), "mask" rho or 1 where low <= rho <= high, else 0.

    Sources: truncated importance sampling, Ionides (2008), between engine and trainer Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training" (2025); masks, IcePop (arXiv 2510.18855); the
    geometric mean as a mask of whole responses, Liu et al., "When speed kills stability" (2025).

    Args:
        correction: the kind of weight and its limits.
        trainer: (R,) log-probabilities by the trainer before its updates, in nats.
        behaviour: (R,) log-probabilities by the policy that sampled the tokens.
        segments: the responses.
    """
    with torch.no_grad():
        ratio = torch.exp(_level_log_ratio(trainer, behaviour, segments, correction.level))
        if isinstance(correction, TruncatedCorrection):
            return ratio.clamp(max=correction.limit)
        inside = (ratio >= correction.low) & (ratio <= correction.high)
        return torch.where(inside, ratio if correction.weigh else 1.0, 0.0)


def correction_effect(
    correction: Correction, samples: Samples, logprobs: Vector, chosen: NDArray[np.bool_]
) -> dict[str, float]:
    """Mean weight of the importance sampling, and the share of tokens whose ratio is out of range."""
    if isinstance(correction, NoCorrection):
        return {}
    counted = samples.per_response_token(chosen)
    segments = Segments(torch.from_numpy(samples.response_lengths[chosen]))
    trainer, behaviour = (torch.from_numpy(values[counted]) for values in (logprobs, samples.engine_logprobs))
    weights = importance_weights(correction, trainer, behaviour, segments)
    limited = weights == (correction.limit if isinstance(correction, TruncatedCorrection) else 0.0)
    return {"correction_weight": float(weights.mean()), "correction_fraction": float(limited.float().mean())}


def distilled(
    config: DistillConfig, advantages: Vector, teacher: Vector, own: Vector, counted: NDArray[np.bool_]
) -> Vector:
    """(R,) coefficient * (log teacher - log own) + reward_weight * the advantages from rewards, which are (R,), or
    empty if they do not count; 0 where `counted` is False. The first is minus the reverse KL of a token that the policy
    has sampled, so that the loss has the gradient of KL(policy || teacher) on average.

    Sources: generalised knowledge distillation (arXiv 2306.13649) with reverse KL on samples of the student; MiniLLM
    (arXiv 2306.08543) equation 2, a token at a time; Thinking Machines, "On-policy distillation" (2025)."""
    found = np.zeros(len(counted), dtype=np.float32)
    upper, lower = (torch.from_numpy(values[counted]).double() for values in (teacher, own))
    found[counted] = config.coefficient * bounded_log_ratio(upper, lower).numpy()
    if config.reward_weight:
        found += config.reward_weight * advantages
    return found


def _rest(logprobs: torch.Tensor) -> torch.Tensor:
    """Probability of all but k tokens, (R, k) -> (R,); at least what rounding leaves of 1."""
    return (1 - logprobs.exp().sum(-1)).clamp(min=torch.finfo(logprobs.dtype).eps)


def _surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual_limit: float | None = None
) -> TokenLoss:
    plain = -advantages * ratio
    limited = -advantages * ratio.clamp(1 - low, 1 + high)
    loss, clipped = torch.maximum(plain, limited), limited > plain
    if dual_limit is not None:
        most = -advantages * dual_limit
        beyond = (advantages < 0) & (loss > most)
        loss, clipped = torch.where(beyond, most, loss), clipped | beyond
    return TokenLoss(loss, clipped.float())


def _level_log_ratio(trainer: torch.Tensor, behaviour: torch.Tensor, segments: Segments, level: Level) -> torch.Tensor:
    """(R,), bounded like every log-ratio that enters a loss."""
    ratio = bounded_log_ratio(trainer, behaviour)
    if level == "token":
        return ratio
    whole = segments.sum(ratio) if level == "sequence" else segments.mean(ratio)
    return bounded_log_ratio(segments.spread(whole, len(ratio)), torch.zeros_like(ratio))
