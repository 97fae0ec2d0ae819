"""Users of sandboxes are held by one process of the machine at a time, and given back however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gangline.sandbox.shared.users import HeldUser

HOLDS = "import sys; from pathlib import Path; from gangline.sandbox.shared.users import HeldUser\n" + (
    "print(HeldUser('same', Path(sys.argv[1])).uid, flush=True); sys.stdin.read()"
)


def test_one_process_holds_a_user_at_a_time_and_a_killed_one_holds_none(tmp_path: Path) -> None:
    first = HeldUser("same", tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        held = int(other.stdout.readline())
        assert held == first.uid + 1
        other.kill()
    assert HeldUser("same", tmp_path).uid == held


def test_a_released_user_is_given_again_and_leaves_no_file(tmp_path: Path) -> None:
    first, second = HeldUser("same", tmp_path), HeldUser("same", tmp_path)
    assert first.uid != second.uid
    first.release()
    first.release()
    assert os.listdir(tmp_path) == [str(second.uid)]
    assert HeldUser("same", tmp_path).uid == first.uid
