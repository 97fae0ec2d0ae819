"""Tasks that no node can run, through a real service: the submitter hears why, and so does who looks."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.service.cli_process import UpProcess, gangline, wait_for

WAITS = {
    "task_id": "needs-podman",
    "instruction": "x",
    "agent": {"harness": "shell", "settings": {"command": "true"}, "allow_no_model_call": True},
    "runtime": {"backend": "podman", "image": "x"},
}
BREAKS = {**WAITS, "task_id": "needs-docker", "runtime": {"backend": "docker", "image": "x"}}


@pytest.fixture
def up(tmp_path: Path) -> Iterator[UpProcess]:
    broken = tmp_path / "docker"
    broken.write_text("#!/bin/sh\necho 'the daemon is gone' >&2; exit 1\n")
    broken.chmod(0o755)
    service = UpProcess(
        *(tmp_path, "--label", "gpu"),
        env={
            "GANGLINE_PODMAN": "no-such-podman",
            "GANGLINE_DOCKER": str(broken),
            "GANGLINE_IMAGE_FOLDERS": str(tmp_path / "images"),
        },
    )
    try:
        assert service.ready(), service.outcome()
        yield service
    finally:
        service.close()


def seen(up: UpProcess, *command: str) -> str:
    done = gangline(*command, "--data", up.data)
    return " ".join(f"{done.stdout} {done.stderr}".split())


def test_what_is_missing_is_said_at_once_or_after_the_first_try(up: UpProcess) -> None:
    submitted = gangline("submit", "-", "--data", up.data, stdin=json.dumps(WAITS))
    assert submitted.returncode == 0, submitted.stderr
    assert "needs-podman waits: no node can run it" in " ".join(submitted.stderr.split())
    for told in (seen(up, "status"), seen(up, "status", "needs-podman")):
        assert "unplaced: " in told
        assert "no-such-podman" in told or "podman is not installed" in told
    assert gangline("submit", "-", "--data", up.data, stdin=json.dumps(BREAKS)).returncode == 0
    wait_for(lambda: "runtime `docker`" in seen(up, "status", "needs-docker"))
    view = json.loads(gangline("status", "needs-docker", "--json", "--data", up.data).stdout)
    (session,) = view["sessions"]
    assert (session["state"], session["attempt"]) == ("queued", 1), "the session went back unharmed"
    assert "the daemon is gone" in session["unplaced"]


def test_a_label_that_the_operator_gave_is_found_and_another_is_missed(up: UpProcess) -> None:
    runs = {**WAITS, "task_id": "on-gpu", "runtime": {"backend": "process", "node_labels": ["gpu", platform.machine()]}}
    waits = {**runs, "task_id": "on-tpu", "runtime": {"backend": "process", "node_labels": ["tpu"]}}
    for task in (waits, runs):
        assert gangline("submit", "-", "--data", up.data, stdin=json.dumps(task)).returncode == 0
    wait_for(lambda: "completed" in seen(up, "status", "on-gpu"))
    assert "lacks label `tpu`" in seen(up, "status", "on-tpu")


def test_an_image_is_missed_by_name_until_it_is_there(up: UpProcess, tmp_path: Path) -> None:
    image = tmp_path / "images" / "swe"
    task = {**WAITS, "task_id": "in-image", "runtime": {"backend": "sandbox", "image": str(image)}}
    submitted = gangline("submit", "-", "--data", up.data, stdin=json.dumps(task))
    assert submitted.returncode == 0, submitted.stderr
    assert f"lacks image `{image}` for runtime `sandbox`" in " ".join(submitted.stderr.split())
    (image / "usr").mkdir(parents=True)
    (image / "usr" / "file").touch()
    wait_for(lambda: "unplaced: " not in seen(up, "status", "in-image"))
