"""Runs the model in little memory: attention along rows, a chunked output head, and estimates of memory use.

No [T, T] or [T, vocabulary] tensor is formed here. Start with `attention`.
"""
