"""Options that several commands share.

`settings` generates those of `up`, `server`, `node` and `cluster` from the settings' models; `tracing` starts traces.
Start with `settings`.
"""
