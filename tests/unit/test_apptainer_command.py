"""Apptainer's command line for a container, and what is asked of an image; tests/apptainer runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gangline.domain.errors import InvalidRequest, RuntimeUnavailable
from gangline.sandbox.apptainer.command_line import View, checked_image, container_environment, exec_arguments
from gangline.sandbox.apptainer.runtime import ApptainerRuntime
from gangline.sandbox.network.loopback import LoopbackAddress
from gangline.settings.machine import Settings


def _arguments(**fields: object) -> list[str]:
    view: dict[str, object] = {
        "image": "/images/a.sif",
        "overlay": Path("/s/overlay"),
        "shared": {"/workspace": Path("/s/work")},
        "expose": [Path("/tools")],
        "files": {"/etc/passwd": Path("/s/passwd")},
        "empty": Path("/s/empty"),
        "hidden": [],
        "host_network": False,
        "user_namespace": False,
        "fakeroot": False,
    }
    return exec_arguments(["apptainer"], View(**{**view, **fields}))  # pyright: ignore[reportArgumentType]


def test_a_container_has_nothing_but_what_it_is_given() -> None:
    arguments = _arguments()
    assert arguments[0] == "apptainer"
    assert arguments[-1] == "/images/a.sif"
    assert "--containall" in arguments
    assert arguments[arguments.index("--no-mount") + 1] == "home,tmp,sys,bind-paths"
    assert arguments[arguments.index("--overlay") + 1] == "/s/overlay"
    mounts = [arguments[place + 1] for place, word in enumerate(arguments) if word == "--mount"]
    assert mounts == [
        "type=bind,source=/tools,destination=/tools,ro",
        "type=bind,source=/s/work,destination=/workspace",
        "type=bind,source=/s/passwd,destination=/etc/passwd,ro",
    ]


@pytest.mark.parametrize(("host_network", "has_own"), [(False, True), (True, False)])
def test_the_network_is_its_own_unless_it_is_the_hosts(host_network: bool, has_own: bool) -> None:
    assert ("--net" in _arguments(host_network=host_network)) is has_own


@pytest.mark.parametrize(
    ("fields", "present", "absent"),
    [
        ({}, {"--no-privs"}, {"--userns", "--fakeroot"}),
        ({"user_namespace": True}, {"--no-privs", "--userns"}, {"--fakeroot"}),
        ({"user_namespace": True, "fakeroot": True}, {"--fakeroot"}, {"--no-privs", "--userns"}),
    ],
)
def test_who_the_agent_is(fields: dict[str, object], present: set[str], absent: set[str]) -> None:
    arguments = set(_arguments(**fields))
    assert present <= arguments
    assert not absent & arguments


def test_outer_mounts_come_first_and_odd_paths_are_quoted() -> None:
    arguments = _arguments(
        expose=[Path("/a/b/c"), Path("/a")], shared={"/x": Path('/with,comma and "quote"')}, files={}
    )
    mounts = [arguments[place + 1] for place, word in enumerate(arguments) if word == "--mount"]
    assert mounts == [
        "type=bind,source=/a,destination=/a,ro",
        'type=bind,"source=/with,comma and ""quote""",destination=/x',
        "type=bind,source=/a/b/c,destination=/a/b/c,ro",
    ]


def test_an_image_is_a_path_and_nothing_is_pulled(tmp_path: Path) -> None:
    assert checked_image(None) is None
    assert checked_image(str(tmp_path)) == str(tmp_path)
    with pytest.raises(InvalidRequest, match=r"apptainer pull IMAGE\.sif docker://debian:12"):
        checked_image("docker://debian:12")
    for name in ("debian.sif", str(tmp_path / "none.sif")):
        with pytest.raises(InvalidRequest, match="absolute path of an image"):
            checked_image(name)


def test_what_is_apptainers_own_is_not_the_images_environment() -> None:
    env = {
        "OF_IMAGE": "1",
        "PATH": "/opt/conda/bin:/bin",
        "LANG": "C",
        "APPTAINER_NAME": "x",
        "PS1": "> ",
        "HOME": "/root",
    }
    script = f"import subprocess; subprocess.run(['sh', '-c', 'echo ready; read _; exit'], env={env!r})"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        found = container_environment(holder.pid)
        holder.communicate()
    assert found == {"OF_IMAGE": "1", "PATH": "/opt/conda/bin:/bin"}


def test_a_loopback_address_is_held_until_it_is_released() -> None:
    one, two = LoopbackAddress("same"), LoopbackAddress("same")
    try:
        assert one.address != two.address
        assert all(held.address.startswith("127.") and not held.address.startswith("127.0.") for held in (one, two))
        one.release()
        again = LoopbackAddress("same")
        assert again.address == one.address
        again.release()
    finally:
        one.release()
        two.release()


async def test_without_the_program_it_says_what_to_install() -> None:
    settings = Settings.from_environ({"GANGLINE_APPTAINER": "no-such-apptainer"})
    with pytest.raises(RuntimeUnavailable, match="GANGLINE_APPTAINER"):
        await ApptainerRuntime(settings).check()
