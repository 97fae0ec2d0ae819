"""Nodes on the machines of a Ray cluster (extra `cluster`).

`nodes` keeps the requested number of nodes running, `actors` manage their processes on the machines, and `ray` connects
to the cluster. Start with `nodes`.
"""
