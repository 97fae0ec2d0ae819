"""Modules that run in a Python with verifiers: the taskset reader and a task's hooks. Start with `hooks`."""
