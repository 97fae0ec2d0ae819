"""One experiment from start to end.

`trainer` is the loop, `lessons` the learning step, and `experiment` their settings. `checkpoint` and `lineage` write
files, `gangline.train.runs` writes the records, and `dry_run` measures the spread of rewards before a run. Start with
`trainer`.
"""
