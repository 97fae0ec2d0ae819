"""Two nodes with a small cache each go through a registry's outages: the small version of `bench/images_bench.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from containers.engines import installed
from containers.image_judge import judge_images
from support.requirements import need


@pytest.mark.timeout(1200)
async def test_no_session_is_lost_and_each_layer_is_pulled_once_while_it_is_held(tmp_path: Path) -> None:
    need(installed("docker", "dockerd", "docker-registry"), "apt-get install -y docker.io docker-registry")
    need(os.geteuid() == 0, "a Docker daemon needs root")
    found = await judge_images(tmp_path, num_images=12, num_sessions=30, cached_part=0.5, give_up_s=1000)
    assert found.outcomes == {"completed": 30}
    assert found.num_wrong == 0
    assert found.num_pulls > found.num_removed > 0, "the cache is too small for all"
    assert found.worst <= 1.0, found
    assert found.max_waiting > 0
    assert found.run_slots_held == 0, found
