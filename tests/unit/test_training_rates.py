"""Learning rates: as PyTorch's own schedulers have them."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR

from gangline.train.learning.learner_settings import LearnerSettings


def rates(settings: LearnerSettings, num: int) -> list[float]:
    return [settings.rate_factor(number) for number in range(num)]


def of_torch(scheduler: type[LinearLR] | type[CosineAnnealingLR], **options: float) -> list[float]:
    """Of 8 updates, at a rate of 1."""
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    made, found = scheduler(optimiser, **options), list[float]()  # type: ignore[arg-type]
    for _ in range(8):
        found.append(made.get_last_lr()[0])
        optimiser.step()
        made.step()
    return found


def decaying(shape: str, updates: int = 8, **settings: float) -> LearnerSettings:
    return LearnerSettings.model_validate({"decay": {"shape": shape, "updates": updates, "least": 0.1}, **settings})


def test_decays_are_pytorchs() -> None:
    linear = of_torch(LinearLR, start_factor=1.0, end_factor=0.1, total_iters=8)
    assert rates(decaying("linear"), 8) == pytest.approx(linear)
    assert rates(decaying("cosine"), 8) == pytest.approx(of_torch(CosineAnnealingLR, T_max=8, eta_min=0.1))


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_warm_up_comes_first_and_the_smallest_rate_stays(shape: str) -> None:
    found = rates(decaying(shape, updates=10, warmup_steps=2), 13)
    assert found[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert found[2:11] == sorted(found[2:11], reverse=True)
    assert found[10:] == pytest.approx([0.1] * 3)


def test_a_restored_schedule_goes_on() -> None:
    settings = decaying("cosine", warmup_steps=3)
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    made = LambdaLR(optimiser, settings.rate_factor)
    for _ in range(4):
        optimiser.step()
        made.step()
    other = LambdaLR(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5), settings.rate_factor)
    other.load_state_dict(made.state_dict())
    assert other.get_last_lr() == made.get_last_lr() == [pytest.approx(0.5 * settings.rate_factor(4))]


def test_a_decay_that_ends_in_the_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match="above warmup_steps"):
        decaying("linear", updates=3, warmup_steps=3)
