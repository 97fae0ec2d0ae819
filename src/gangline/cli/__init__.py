"""The command line: the composition root, the only place that wires the core together.

`commands` lists the commands and their modules, which are in `service/`, `tasks/`, `results/`, `machine/` and
`starting/`, or in a wing. Each module has a `register(app)` that adds its commands. A module is imported when its
command is used, and most packages are imported inside commands, so that short commands start fast. Documents go to
stdout (one JSON document, or JSON lines, with `--json`), everything else to stderr. Start with `main`.
"""
