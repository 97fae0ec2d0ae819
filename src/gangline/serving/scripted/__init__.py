"""The scripted engine: an engine server whose replies come from a script.

`server` starts it and contains its sampler, `script` is the format of the file, and `faults` are the failures it can
simulate. Start with `server`.
"""
