"""Parses untrusted text, in linear time or in limited child processes. Start with `isolated.py`."""
