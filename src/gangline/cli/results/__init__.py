"""Commands for results: show, logs, audit, drift, export, and open, which leads to the page that shows them.

`records` reads the results from disk or from a server. Start with `show`.
"""
