"""New weights into running engines.

`update` is the whole exchange with the service, `folders` the files, and `fleet` the engines; `upkeep` repeats it while
a run lasts. Start with `update`.
"""
