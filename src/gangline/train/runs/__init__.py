"""Training runs as their folders tell them: written by trainers, read by commands and by the page.

`records` are the lines of a run's files, `log` writes and reads those of steps and evaluations, and `store` reads whole
runs and compares them. Nothing here trains. Start with `store`.
"""
