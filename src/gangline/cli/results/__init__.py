"""Commands for results: show, logs, audit, drift, export.

`records` finds the results, on the disk or at a server. Start with `show`.
"""
