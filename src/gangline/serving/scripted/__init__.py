"""The scripted engine: an engine server whose replies come from a script.

`server` starts it and holds its sampler, `script` is the format of the file, `faults` are the failures that it can
play. Start with `server`.
"""
