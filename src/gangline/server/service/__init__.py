"""The rollout service, without HTTP.

`core` admits tasks, leases sessions and accepts results. Other modules send callbacks and delete old tasks. Start with
`core`.
"""
