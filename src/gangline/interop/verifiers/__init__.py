"""The border to verifiers: its tasks' hooks and rewards over our sessions. `tasks` makes tasks of its tasksets, and
commands for a Python that has it; `inside/` has their modules, which need verifiers and no package of ours.

Start with `tasks`.
"""
