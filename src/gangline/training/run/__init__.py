"""One experiment from beginning to end.

`trainer` is the loop, `lessons` the learning in it, and `experiment` their settings. `checkpoint`, `lineage` and `log`
write files, `store` reads the runs of a data folder, and `dry_run` measures the spread of rewards before a run.
Start with `trainer`.
"""
