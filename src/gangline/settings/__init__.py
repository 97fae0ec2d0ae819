"""Settings: one model each for a machine, a server, a node and a cluster's nodes, behind options and gangline.toml.

`machine` holds the settings that every command reads, `node` and `service` those of the commands that serve.
`service.resolve` merges the sources (`sources`), and is the only reader of environment and config file beside
`Settings.from_environ` and `read_secret`. Start with `node`.
"""
