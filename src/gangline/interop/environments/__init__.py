"""Environment kinds: turns a task's environment configuration into a program that serves it as MCP tools.

A node starts the program for each session, offers its tools to the agent and records their calls: see
`gangline.node.environments`. The programs are in `in_sandbox/`. Start with `kinds`.
"""
