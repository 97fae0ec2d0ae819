"""The recipes of docs/guides/cluster.md name options that there are, of ours and of Ray's."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gangline.cli.commands import load_command
from support.requirements import need_module

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "cluster.md").read_text()
KUBERNETES = re.search(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)


def blocks() -> Iterator[str]:
    """Shell of the page, a command a line, and the command of the job."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE):
        if language in ("", "bash"):
            yield block.replace("\\\n", " ")
    yield from (job["spec"]["entrypoint"] for job in documents() if job["kind"] == "RayJob")


def documents() -> list[Any]:
    need_module("yaml", "pip install pyyaml")
    import yaml

    assert KUBERNETES
    return list(yaml.safe_load_all(KUBERNETES.group(1)))


def calls() -> Iterator[list[str]]:
    """Words of each call of `gangline` and `ray`."""
    for block in blocks():
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            starts = [index for index, word in enumerate(words) if word in ("gangline", "ray")]
            for start, end in pairwise([*starts, len(words)]):
                yield words[start:end]


def options_of(program: str, command: str) -> set[str]:
    if program == "gangline":
        params: list[Any] = load_command(command).params
    else:
        need_module("ray", "pip install 'gangline[cluster]'")
        from ray.scripts.scripts import cli as root

        params = root.commands[command].params
    known = {name for param in params for name in param.opts}
    return known | options_of("ray", "start") if command == "symmetric-run" else known


def test_every_call_names_options_that_there_are() -> None:
    named = []
    for program, command, *rest in calls():
        given = {word.split("=")[0] for word in rest if word.startswith("--") and word != "--"}
        assert given <= options_of(program, command), (program, command)
        named.append((program, command))
    assert {("ray", "start"), ("ray", "symmetric-run"), ("gangline", "up")} <= set(named)


@pytest.mark.parametrize("group", ["head", "sandboxes"])
def test_what_kuberay_is_told_to_start_ray_with_is_known_to_ray(group: str) -> None:
    job, service = documents()
    cluster = job["spec"]["rayClusterSpec"]
    one = cluster["headGroupSpec"] if group == "head" else cluster["workerGroupSpecs"][0]
    assert {f"--{name}" for name in one["rayStartParams"]} <= options_of("ray", "start")
    labels = cluster["headGroupSpec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_workers_have_what_the_nodes_of_the_job_ask_for() -> None:
    job, _ = documents()
    words = shlex.split(job["spec"]["entrypoint"])
    asked = json.loads(words[words.index("--node-resources") + 1])
    params = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["rayStartParams"]
    (given,) = shlex.split(params["resources"])  # KubeRay puts it into a shell
    assert json.loads(given).items() >= asked.items()
