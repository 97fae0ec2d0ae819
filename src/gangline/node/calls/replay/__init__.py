"""Answers that are given again: to retries after a restart, and to forks. Start with `answered`."""
