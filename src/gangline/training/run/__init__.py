"""One experiment from beginning to end.

`trainer` is the loop, `experiment` its settings, and `checkpoint`, `lineage` and `log` what it leaves on the disk.
Start with `trainer`.
"""
