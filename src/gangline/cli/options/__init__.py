"""Options that several commands share.

`settings` generates the options of `up`, `server`, `node` and `cluster` from the settings' models; `tracing` starts
traces. Start with `settings`.
"""
