"""One experiment from beginning to end.

`trainer` is the loop, `lessons` the learning in it, and `experiment` their settings. `checkpoint` and `lineage` write
files, `gangline.train.runs` the records, and `dry_run` measures the spread of rewards before a run.
Start with `trainer`.
"""
