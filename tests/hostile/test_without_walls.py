"""Every attack succeeds in a runtime without walls: one that could not would be no check."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from support.hostility import Attack, Grounds, attacked_grounds, attacks
from support.hostility.open_runtime import OpenRuntime
from support.requirements import need

NUM_FURTHER_TRIES = 2
"""Some attacks are races, which they may lose by chance."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_grounds(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Grounds]:
    need(os.geteuid() == 0, "only root has no walls before it")
    async with attacked_grounds(OpenRuntime(), tmp_path_factory.mktemp("open"), attacks(isolated=True)) as grounds:
        yield grounds


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("attack", attacks(isolated=True), ids=lambda attack: attack.name)
async def test_an_attack_succeeds_where_there_is_no_wall(attack: Attack, open_grounds: Grounds) -> None:
    verdict = await open_grounds.attacked(attack)
    for _ in range(NUM_FURTHER_TRIES):
        if verdict.outcome == "held":
            verdict = await open_grounds.attacked(attack)
    if verdict.outcome == "absent":
        pytest.skip(f"does not apply: {verdict.told}")
    assert verdict.outcome == "breached", f"{verdict.outcome}: {verdict.told}"


def test_there_are_more_than_a_hundred_and_twenty_attacks_each_with_a_name_of_its_own() -> None:
    names = [attack.name for attack in attacks(isolated=True)]
    assert len(names) >= 120
    assert len(names) == len(set(names))
