"""Replayed answers: for retries after a restart, and for forks. Start with `answered`."""
