"""Settings of a machine, a server, a node and a cluster's nodes: one model each, shared by options and gangline.toml.

`machine` has the settings for all commands, `node` and `service` the settings for serving commands. `service.resolve`
merges the sources (`sources`). Only it, `Settings.from_environ` and `read_secret` read environment and config file.
Start with `node`.
"""
