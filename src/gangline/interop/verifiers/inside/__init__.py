"""Modules that run in a Python with verifiers: the reader of tasksets, and the hooks of a task. Start with `hooks`."""
