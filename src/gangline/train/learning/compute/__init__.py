"""The model's computation with little memory: attention along rows, an output head by chunks, and the memory of a run.

Nothing here forms a [T, T] or a [T, vocabulary] tensor. Start with `attention`.
"""
