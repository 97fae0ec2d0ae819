"""New weights into running engines.

`update` is the whole exchange with the service, with its files, and `fleet` the engines; `upkeep` repeats it while
a run lasts. Start with `update`.
"""
