"""The limits and walls around a command.

`limits` and `cgroups` bound memory, processes and time on the processor; `system_calls` and `seccomp` filter the
kernel's doors; `masks` hides folders of the host. Start with `limits`.
"""
