"""The rollout service, without HTTP.

`core` admits tasks, leases sessions and takes results; beside it callbacks are sent and old tasks forgotten. Start
with `core`.
"""
