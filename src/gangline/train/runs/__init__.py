"""Training runs as recorded in their folders: written by trainers, read by commands and the page.

`records` defines the lines of a run's files, `log` writes and reads records of steps and evaluations, and `store` reads
and compares whole runs. Nothing here trains. Start with `store`.
"""
