"""The command line: the composition root, the only place that wires rooms together.

`main` lists the modules of commands, which are in `service/`, `tasks/`, `results/`, `learning/` and `machine/`; each
has a `register(app)` that adds its commands. Rooms are imported inside commands, so that `--help` is fast. Documents go
to stdout (one JSON document, or JSON lines, with `--json`), everything else to stderr. Start with `main`.
"""
