"""Inspect's display is for people."""

import os

os.environ.setdefault("INSPECT_DISPLAY", "none")
