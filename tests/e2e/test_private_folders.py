"""Data folders are closed to other users of the machine: whatever the umask is, whatever was there before."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.service.cli_process import UpProcess, clean_environment, gangline

NOBODY = 65534


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def in_the_open() -> Iterator[Path]:
    """A folder that every user of the machine can enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="gangline-open-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def open_to_others(folder: Path) -> dict[str, str]:
    """Path below `folder` -> mode of all that others may do something with; what sandboxes have is their own, and a
    socket is behind the folder that it is in."""
    found: dict[str, str] = {}
    for name, folders, files in os.walk(folder):
        for entry in (".", *folders, *files):
            path = Path(name, entry)
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode & 0o077 and not path.is_symlink() and not path.is_socket():
                found[str(path.relative_to(folder))] = oct(mode)
        folders[:] = [entry for entry in folders if entry != "runtimes"]
    return found


@pytest.mark.usefixtures("open_umask")
def test_nothing_in_a_data_folder_is_open_to_others_with_any_umask(tmp_path: Path):
    data = tmp_path / "data"
    for old in ("server/results/t/s", "nodes/node-1/journal", "logs", "demo"):
        (data / old).mkdir(parents=True)
        (data / old / "old").write_text("an answer")
    agent = {"harness": "shell", "settings": {"command": "echo done"}, "allow_no_model_call": True}
    task = {"task_id": "t", "instruction": "x", "agent": agent}
    (tmp_path / "task.json").write_text(json.dumps(task))
    up = UpProcess(tmp_path)
    try:
        assert up.ready(), up.outcome()
        done = gangline("submit", tmp_path / "task.json", "--wait", "--data", data)
        assert done.returncode == 0, done.stderr
        found = open_to_others(data)  # with -wal and -shm, as it runs
        assert (data / "server" / "gangline.db-wal").exists()
        assert (data / "server" / "results" / "t").is_dir()
    finally:
        up.close()
    assert found == {}
    assert open_to_others(data) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.usefixtures("open_umask")
def test_another_user_reads_nothing_of_a_server_that_runs(in_the_open: Path):
    data = in_the_open / "data"
    up = UpProcess(in_the_open)
    try:
        assert up.ready(), up.outcome()
        for name in ("server/gangline.db", "control_token", "up.json", "logs/server.log"):
            told = subprocess.run(
                ["/bin/cat", data / name],
                user=NOBODY,
                group=NOBODY,
                extra_groups=[],
                capture_output=True,
                text=True,
                check=False,
            )
            assert (told.returncode, told.stdout) == (1, ""), told
            assert "Permission denied" in told.stderr
    finally:
        up.close()


def test_a_folder_with_things_that_are_not_ours_is_left_open_and_ours_in_it_are_closed(tmp_path: Path):
    from gangline.machine.private import close_to_others, open_data_folder

    home = tmp_path / "home"
    (home / "photos").mkdir(parents=True)
    home.chmod(0o755)
    (home / "photos").chmod(0o755)
    open_data_folder(home)
    close_to_others(home / "server")
    assert stat.S_IMODE(home.stat().st_mode) == 0o755
    assert stat.S_IMODE((home / "photos").stat().st_mode) == 0o755
    assert stat.S_IMODE((home / "server").stat().st_mode) == 0o700


def checked(data: Path, **env: str) -> dict[str, str]:
    told = subprocess.run(
        [sys.executable, "-c", _CHECK, str(data)],
        capture_output=True,
        text=True,
        check=True,
        env=clean_environment(**env),
    )
    return json.loads(told.stdout)


_CHECK = """
import sys, pathlib, msgspec
from gangline.cli.machine.doctor import check_data_folder
from gangline.settings.machine import Settings
settings = Settings.from_environ().model_copy(update={"data_dir": pathlib.Path(sys.argv[1])})
print(msgspec.json.encode(check_data_folder(settings)).decode())
"""


def test_doctor_names_what_others_can_read_and_where_sandboxes_would_see_it(in_the_open: Path):
    data = in_the_open / "data"
    assert checked(data)["state"] == "ok"
    (data / "server").mkdir(parents=True, mode=0o700)
    data.chmod(0o700)
    (data / "server" / "gangline.db").write_text("")
    assert checked(data)["state"] == "ok"  # the folder is closed, so nobody comes to what is in it
    data.chmod(0o755)
    (data / "server").chmod(0o755)
    (data / "server" / "gangline.db").chmod(0o644)
    told = checked(data)
    assert told["state"] == "optional"
    assert "server/gangline.db" in told["found"]
    assert "chmod" in told["advice"]
    data.chmod(0o700)
    seen = checked(data, GANGLINE_EXPOSE=str(in_the_open))
    assert seen["state"] == "optional"
    assert str(in_the_open) in seen["found"]
    in_the_open.chmod(0o777)
    assert "replace" in checked(data)["found"]
