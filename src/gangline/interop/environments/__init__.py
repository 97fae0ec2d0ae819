"""Kinds of environments: what a task says of one becomes a program that serves it as MCP tools. Start with `kinds`.

A node starts the program for each session, gives its tools to the agent and keeps what the agent does with them: see
`gangline.node.environments`. `inside/` has the programs.
"""
