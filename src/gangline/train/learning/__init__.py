"""Turns groups into a gradient step.

`samples` turns groups into rows with advantages, `packing` turns rows into batches, and `loss` and `learner` train on
them. `algorithms` defines the named methods. Start with `algorithms`, then `learner`.
"""
