"""Comparability: which distribution a turn's log-probs belong to, and whether its tokens were drawn from it.

There are two questions, for two users. The audit recomputes log-probs, so it asks whether they are softmax(logits /
temperature) (`why_not_comparable`). A trainer weighs each token by its own log-prob over the reported one, so it also
asks whether the token was drawn from that distribution (`why_not_trainable`): top-p, a penalty or a grammar draws from
another one, and raw log-probs are from before the temperature. If the ids that top-k and top-p left are known, a
trainer that replays them computes that other distribution, and the log-probs belong to it too.

Fields that would change the distribution and are not in `SamplingParams` (min-p, a repetition penalty, a logit bias)
never reach an engine: the dialects refuse them.
"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.domain.completion import Certificate
from gangline.domain.evidence.masks import is_masked, why_not_replayed


def scoring_temperature(certificate: Certificate) -> float:
    """Returns the temperature of the recorded log-probs: 1 for raw ones, which are from before the temperature, and for
    greedy sampling (0), which records the untempered distribution."""
    temperature = certificate.sampling.temperature
    if certificate.logprobs == "raw" or temperature is None or temperature == 0:
        return 1.0
    return temperature


def why_not_comparable(certificate: Certificate) -> str | None:
    """Returns why a completion's log-probs are not softmax(logits / temperature); None when they are."""
    if certificate.logprobs == "missing":
        return "log-probs missing"
    if certificate.constraint is not None:
        return f"sampled under a grammar ({certificate.constraint})"
    if certificate.logprobs == "raw":
        return None
    found = [name for name, _ in _penalties(certificate)]
    if certificate.logprobs == "processed":  # SGLang's are from before top-k and top-p
        found = [name for name, _ in _cuts(certificate)] + found
    return f"sampled with {', '.join(found)}" if found else None


def why_not_trainable(certificate: Certificate) -> str | None:
    """Returns why a completion's log-probs do not belong to the distribution that its tokens were drawn from, with the
    remedy; None when they do, and can be recomputed."""
    if certificate.logprobs == "missing":
        return "log-probs missing: use an engine that reports them"
    if certificate.constraint == "tool_choice":
        return "sampled under a grammar (tool_choice): let the agent leave tool_choice at auto"
    if certificate.constraint is not None:
        return f"sampled under a grammar ({certificate.constraint}): let the agent ask for plain text"
    replayed = is_masked(certificate) and certificate.logprobs == "processed"
    if changed := [*(() if replayed else _cuts(certificate)), *_penalties(certificate)]:
        named = ", ".join(f"{name} {value:g}" for name, value in changed)
        neutral = ", ".join(f"capture.sampling.{name}.override: {_NEUTRAL[name]}" for name, _ in changed)
        why = why_not_replayed(certificate)
        unknown = "" if why is None else f", and what they left cannot be replayed ({why})"
        return f"sampled with {named}{unknown}: set {neutral} in the tasks"
    temperature = certificate.sampling.temperature
    if temperature == 0:
        return "sampled greedily (temperature 0): set capture.sampling.temperature.override: 1 in the tasks"
    if certificate.logprobs == "raw" and temperature not in (None, 1.0):
        return (
            f"raw log-probs at temperature {temperature:g}, from before the temperature: start vLLM with "
            "--logprobs-mode processed_logprobs, or set capture.sampling.temperature.override: 1 in the tasks"
        )
    return None


_NEUTRAL = {"top_p": 1, "top_k": -1, "presence_penalty": 0, "frequency_penalty": 0}


def _cuts(certificate: Certificate) -> Iterator[tuple[str, float]]:
    sampling = certificate.sampling
    if sampling.top_p not in (None, 1.0):
        yield "top_p", sampling.top_p
    if sampling.top_k not in (None, 0, -1):
        yield "top_k", sampling.top_k


def _penalties(certificate: Certificate) -> Iterator[tuple[str, float]]:
    sampling = certificate.sampling
    if sampling.presence_penalty not in (None, 0.0):
        yield "presence_penalty", sampling.presence_penalty
    if sampling.frequency_penalty not in (None, 0.0):
        yield "frequency_penalty", sampling.frequency_penalty
