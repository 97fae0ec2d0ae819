"""What keeps a node sound.

`breaker` and `disk_guard` stop it from taking sessions, `watchdog` finds sessions that hang, and `metrics` counts.
Start with `breaker`.
"""
