"""Protects a node's health.

`breaker` and `disk_guard` stop it from taking sessions, `watchdog` finds sessions that hang, and `metrics` counts.
Start with `breaker`.
"""
