"""One experiment from beginning to end.

`trainer` is the loop, `experiment` its settings, and `checkpoint`, `lineage` and `log` what it leaves on the disk.
`store` reads the runs of a data folder, and `dry_run` measures the spread of rewards before a run.
Start with `trainer`.
"""
