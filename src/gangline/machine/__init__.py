"""Operating-system helpers: durable and private files, untrusted files, child programs, logs, traces.

Start with `durable`.
"""
