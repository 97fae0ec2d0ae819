"""Pushes new weights to running engines.

`update` is the whole exchange with the service, including its files. `fleet` represents the engines, and `upkeep`
repeats updates during a run. Start with `update`.
"""
