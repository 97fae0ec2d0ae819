"""The loop alongside prime-rl's trainer, without prime-rl; `tests/trainers/test_prime_rl.py` asks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.train.learning.algorithms import algorithm
from gangline.train.trainers.prime_rl.feed import feed
from gangline.train.trainers.prime_rl.samples import PrimeSettings, to_samples
from support.training.fakes import Engines
from support.training.samples import group

GRPO = algorithm("grpo")


class Nobody:
    async def collect(self, num_groups: int) -> Any:
        raise AssertionError("nothing is collected")


def settings(**changes: Any) -> PrimeSettings:
    return PrimeSettings.model_validate(
        {"num_samples": 2, "groups_per_step": 1, "seq_len": 200, "max_steps": 9, **changes}
    )


@pytest.mark.parametrize(
    ("left", "start_step"),
    [("rollouts/step_1", 0), ("rollouts/step_7", 0), ("broadcasts/step_0", 0), ("broadcasts/step_4", 4)],
)
async def test_a_folder_with_steps_of_another_run_is_refused(tmp_path: Path, left: str, start_step: int) -> None:
    (tmp_path / left).mkdir(parents=True)
    with pytest.raises(InvalidRequest, match=rf"there before this run: {tmp_path}/{left}\. .*Start this before"):
        await feed(tmp_path, Nobody(), Engines(), settings(start_step=start_step), GRPO)


async def test_steps_before_the_checkpoint_are_no_leftovers(tmp_path: Path) -> None:
    for before in ("rollouts/step_4", "broadcasts/step_3", "broadcasts/later"):
        (tmp_path / before).mkdir(parents=True)
    with pytest.raises(ImportError, match="prime-rl is not here"):
        await feed(tmp_path, Nobody(), Engines(), settings(start_step=4), GRPO)


def test_without_prime_rl_no_row_is_made() -> None:
    with pytest.raises(ImportError, match="run this in the environment that prime-rl trains in"):
        to_samples([group(1.0, 0.0)], settings(), GRPO)


def test_the_name_of_prime_rls_totals_is_refused() -> None:
    with pytest.raises(ValidationError, match="reserves the name"):
        settings(env_name="all")
