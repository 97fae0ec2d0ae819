"""Commands for results: show, logs, audit, drift, export, and open, which leads to the page that shows them.

`records` finds the results, on the disk or at a server. Start with `show`.
"""
