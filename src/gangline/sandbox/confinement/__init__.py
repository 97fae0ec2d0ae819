"""The limits and walls around a command.

`limits` and `cgroups` bound memory, processes and processor time; `system_calls` and `seccomp` filter system calls;
`masks` hides folders of the host. Start with `limits`.
"""
