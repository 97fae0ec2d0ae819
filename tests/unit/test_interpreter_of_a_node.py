"""A node collects what it loaded no more, looks at young objects less often, and lets threads give way soon."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc
import sys
from gangline.gateway.health.interpreter import settle_interpreter
before = gc.get_threshold(), len(gc.get_objects())
settle_interpreter()
assert gc.get_freeze_count() > 0.9 * before[1], gc.get_freeze_count()
assert len(gc.get_objects()) < 0.1 * before[1], len(gc.get_objects())
assert gc.get_threshold()[0] > before[0][0] and gc.isenabled()
assert sys.getswitchinterval() < 0.001
"""


def test_what_was_loaded_is_not_looked_at_again() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
