"""Algorithms: named settings of the loss, advantages and reward shaping, each defined by its difference from GRPO.

Sources: GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783), RLOO (2402.14740), DAPO (2503.14476), GSPO (2507.18071), CISPO
(2506.13585), GRPO++ (length-normalised GRPO), PPO (1707.06347) with dual clip (1912.09729), `ppo` with a critic, RAFT
(2304.06767), which is fine-tuning on accepted samples. For the other algorithms, see the modules of `losses` and
`advantages`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import ValidationError, model_validator

from gangline.domain.errors import InvalidRequest, UnknownPlugin
from gangline.domain.mistakes import mistakes
from gangline.train.learning.advantages import AdvantageSettings
from gangline.train.learning.credit.critic.settings import CriticSettings
from gangline.train.learning.credit.resampling import ResamplingSettings
from gangline.train.learning.credit.traces import CreditSettings
from gangline.train.learning.credit.turns import TurnCreditSettings
from gangline.train.learning.loss_settings import LossSettings
from gangline.train.learning.losses.reward_kl import RewardKLSettings
from gangline.train.learning.rewards import RewardShaping
from gangline.train.options import TrainingOptions


class Algorithm(TrainingOptions):
    """The settings that distinguish one policy-gradient method from another. The default is GRPO."""

    shaping: RewardShaping = RewardShaping()
    credit: CreditSettings = CreditSettings()
    turn_credit: TurnCreditSettings = TurnCreditSettings()
    advantage: AdvantageSettings = AdvantageSettings()
    critic: CriticSettings | None = None
    """Computes advantages from a critic's values instead of the group; None compares sessions."""
    token_baseline: Literal["optimal"] | None = None
    """A baseline per token, from the returns and gradient sizes of the group's sessions; None: one per session."""
    compare: Literal["sessions", "roles"] = "sessions"
    """Whether to compare the rewards of sessions, or of each role in them (M-GRPO)."""
    dynamic_sampling: bool = False
    """Whether to leave out groups whose rewards are all equal and collect others instead."""
    resampling: ResamplingSettings | None = None
    """Weighs a step's sessions by their rewards; None: all equal."""
    loss: LossSettings = LossSettings()
    reward_kl: RewardKLSettings = RewardKLSettings()
    """A penalty in the reward, in addition to `loss.kl`."""

    @property
    def needs_reference(self) -> bool:
        """Whether a penalty needs the reference model."""
        return self.loss.kl.coefficient > 0 or self.reward_kl.coefficient > 0

    @property
    def has_teacher(self) -> bool:
        return self.loss.distillation is not None

    @property
    def moves_all_tokens(self) -> bool:
        """Whether tokens of advantage 0, as in groups whose rewards are all equal, have a gradient too."""
        return self.loss.moves_all_tokens or self.follows_from_scores

    @property
    def follows_from_scores(self) -> bool:
        """Whether advantages depend on the model's scores of the tokens. Only the reference trainer supports this."""
        return self.critic is not None or self.token_baseline is not None

    def require_group_advantages(self, trainer: str, *, one_by_one: bool = False) -> None:
        """Raises: InvalidRequest if `trainer` cannot use these advantages. one_by_one: it receives single groups."""
        if self.follows_from_scores:
            raise InvalidRequest(
                f"{trainer} gets ready advantages, and those of a critic or a token baseline follow from scores in the "
                "reference trainer. Leave out critic and token_baseline, or use that trainer's own."
            )
        if self.has_teacher:
            raise InvalidRequest(f"{trainer} gets no log-probs of a teacher: leave out loss.distillation.")
        if self.resampling is not None:
            raise InvalidRequest(f"{trainer} gets every session, and resampling leaves some out: leave out resampling.")
        if one_by_one and self.advantage.is_of_step:
            raise InvalidRequest(
                f"{trainer} gets groups one by one, and advantage.scale batch and advantage.factor are over all groups "
                "of a step: set the scale to deviation or none, and the factor to none."
            )

    @model_validator(mode="after")
    def _critic_stands_for_the_group(self) -> Algorithm:
        if self.critic is None:
            return self
        if self.advantage.baseline != "none":
            raise ValueError(
                "a critic is the baseline: alongside it advantage.baseline must be none and advantage.scale batch or "
                "none, as in algorithm ppo"
            )
        if self.compare == "roles" or self.credit.scheme != "broadcast" or self.turn_credit.returns is not None:
            raise ValueError(
                "compare: roles, credit.scheme and turn_credit.returns are of comparisons within a group, which a "
                "critic replaces: leave them out. turn_credit.weight makes turns' scores rewards"
            )
        return self

    @model_validator(mode="after")
    def _token_baseline_stands_for_the_group(self) -> Algorithm:
        if self.token_baseline is None:
            return self
        others = self.compare == "roles" or self.credit.scheme != "broadcast" or self.turn_credit.returns is not None
        if others or self.critic is not None or self.advantage.baseline != "none":
            raise ValueError(
                "token_baseline is the baseline: alongside it advantage.baseline must be none, as in algorithm otb, "
                "compare `sessions`, credit.scheme `broadcast`, without a critic and turn_credit.returns"
            )
        return self

    @model_validator(mode="after")
    def _spreads_what_it_compares(self) -> Algorithm:
        if self.compare == "roles" and self.credit.scheme != "broadcast":
            raise ValueError("credit.scheme spreads a session's advantage: with compare `roles` it must be `broadcast`")
        if self.compare == "roles" and self.reward_kl.coefficient > 0:
            raise ValueError("reward_kl is of sessions: with compare `roles` use loss.kl")
        if self.turn_credit.returns is not None and (self.compare == "roles" or self.credit.scheme != "broadcast"):
            raise ValueError(
                "turn_credit.returns compares turns: with it compare must be `sessions`, credit.scheme `broadcast`"
            )
        if self.turn_credit.returns is not None and self.advantage.baseline in ("length_weighted", "second_best"):
            raise ValueError(f"advantage.baseline {self.advantage.baseline} is of sessions, not of turns")
        if self.has_teacher and self.dynamic_sampling:
            raise ValueError("dynamic_sampling leaves out groups of one reward, of which a teacher judges every token")
        self._require_whole_rewards()
        of_turns = self.turn_credit.returns is not None or self.turn_credit.weight > 0
        if self.advantage.baseline == "greedy" and (self.compare == "roles" or of_turns):
            raise ValueError("advantage.baseline greedy is of sessions, not of turns or roles")
        if self.advantage.baseline in ("none", "greedy") and self.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling leaves out groups of one reward, which teach without a baseline of the group"
            )
        return self

    def _require_whole_rewards(self) -> None:
        """Raises: ValueError if parts are compared together with settings that need whole rewards."""
        changes = (
            self.shaping != RewardShaping() or self.reward_kl.coefficient > 0 or self.turn_credit.returns is not None
        )
        if self.advantage.rewards == "parts" and (changes or self.critic is not None or self.compare == "roles"):
            raise ValueError(
                "advantage.rewards `parts` compares parts of the sessions' rewards, and shaping, reward_kl, "
                "turn_credit.returns, critic and compare: roles are of whole rewards: leave them out"
            )


OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage.scale": "none", "loss.aggregation": "fixed_length"},
    "rloo": {"advantage.baseline": "leave_one_out", "advantage.scale": "none"},
    "dapo": {
        "shaping.overlong_penalty": {"max_tokens": 16384, "margin_tokens": 4096},
        "dynamic_sampling": True,
        "loss.clip_high": 0.28,
        "loss.aggregation": "token_mean",
    },
    "gspo": {"loss.ratio_level": "sequence", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4},
    "cispo": {
        "loss.clipping": "weights",
        "loss.clip_low": 1.0,
        "loss.clip_high": 4.0,
        "loss.aggregation": "token_mean",
    },
    "grpo_pp": {"shaping.length_scaling": {"target_tokens": 2000, "alpha": 0.5}, "advantage.clip": 5.0},
    "ppo": {
        "critic": {},
        "advantage.baseline": "none",
        "advantage.scale": "batch",
        "loss.dual_clip": 3.0,
        "loss.aggregation": "token_mean",
    },
    "ppo_clip": {"loss.dual_clip": 3.0, "loss.aggregation": "token_mean"},
    "reinforce_pp": {"advantage.baseline": "none", "advantage.scale": "batch", "loss.aggregation": "token_mean"},
    "reinforce_pp_baseline": {"advantage.scale": "batch", "loss.aggregation": "token_mean"},
    "opo": {"advantage.baseline": "length_weighted", "advantage.scale": "none", "loss.clipping": "none"},
    "pass_at_k": {"advantage.baseline": "second_best"},
    "gpg": {
        "advantage.scale": "none",
        "advantage.factor": "judged",
        "loss.clipping": "none",
        "loss.aggregation": "token_mean",
    },
    "gdpo": {"advantage.rewards": "parts", "advantage.scale": "batch", "loss.aggregation": "token_mean"},
    "gmpo": {
        "loss.clipping": "geometric",
        "loss.clip_low": 0.4,
        "loss.clip_high": 0.4,
        "loss.aggregation": "sequence_mean",
    },
    "sapo": {"loss.clipping": "soft", "loss.aggregation": "sequence_mean"},
    "dppo_tv": {"loss.clipping": "divergence_tv", "loss.aggregation": "token_mean"},
    "dppo_kl": {
        "loss.clipping": "divergence_kl",
        "loss.clip_low": 0.05,
        "loss.clip_high": 0.05,
        "loss.aggregation": "token_mean",
    },
    "clip_cov": {"loss.clipping": "covariance", "loss.aggregation": "token_mean"},
    "kl_cov": {"loss.clipping": "covariance_kl", "loss.aggregation": "token_mean"},
    "dro": {"loss.clipping": "quadratic", "loss.aggregation": "token_mean"},
    "raft": {
        "advantage.baseline": "none",
        "advantage.scale": "none",
        "loss.clipping": "none",
    },
    "otb": {
        "token_baseline": "optimal",
        "advantage.baseline": "none",
        "advantage.scale": "none",
        "loss.aggregation": "token_mean",
    },
    "remax": {"advantage.baseline": "greedy", "advantage.scale": "none", "loss.aggregation": "token_mean"},
    "pf_ppo": {
        "critic": {},
        "advantage.baseline": "none",
        "advantage.scale": "batch",
        "resampling": {"method": "power"},
        "loss.dual_clip": 3.0,
        "loss.aggregation": "token_mean",
    },
    "distill": {"loss.distillation": {}, "loss.aggregation": "token_mean"},
    "icepop": {
        "loss.correction": {"level": "token", "mode": "mask", "floor": 0.5, "cap": 5.0},
        "loss.aggregation": "token_mean",
    },
}
"""name -> dotted setting -> value."""


def algorithm(name: str, overrides: Mapping[str, Any] | None = None) -> Algorithm:
    """The settings of that name, with `overrides` (dotted setting -> value) applied.

    Raises: UnknownPlugin if there is no algorithm of that name, InvalidRequest if an override does not fit.
    """
    if name not in OVERRIDES:
        raise UnknownPlugin.named("algorithm", name, OVERRIDES)
    fields = Algorithm().model_dump()
    for setting, value in {**OVERRIDES[name], **(overrides or {})}.items():
        _set(fields, setting, copy.deepcopy(value))  # a later override may reach into it
    try:
        return Algorithm.model_validate(fields)
    except ValidationError as error:
        wrong = "; ".join(mistakes(error, Algorithm))
        raise InvalidRequest(f"algorithm {name} with these overrides does not fit: {wrong}.") from error


def _set(fields: dict[str, Any], setting: str, value: Any) -> None:
    *path, last = setting.split(".")
    for part in path:
        inner = fields.get(part)
        if inner is None:
            inner = fields[part] = {}
        if not isinstance(inner, dict):
            raise InvalidRequest(f"there is no setting {setting}: {part} has no settings of its own.")
        fields = cast("dict[str, Any]", inner)
    fields[last] = value


def differences(settings: Algorithm, base: Algorithm | None = None) -> dict[str, tuple[Any, Any]]:
    """dotted setting -> (value in `base`, value here), for settings that differ. base: GRPO if None."""
    before, after = _flat((base or Algorithm()).model_dump()), _flat(settings.model_dump())
    names = [*after, *(name for name in before if name not in after)]
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat.update(_flat(cast("dict[str, Any]", value), f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
