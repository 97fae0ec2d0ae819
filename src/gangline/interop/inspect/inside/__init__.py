"""Modules that run in a Python with Inspect: the reader of its tasks, the runner of its scorers, and the files and
commands of sandboxes. Start with `scoring`."""
