"""Nodes on the machines of a Ray cluster (extra `cluster`).

`nodes` keeps as many nodes as are asked for, `actors` guard their processes on the machines, and `ray` connects to the
cluster. Start with `nodes`.
"""
