"""Tools that act in the sandbox through the session's action server, and the two that end or accompany a solution.

Each module is one tool: its arguments as a struct, from which the schema is made, and its class. Start with `think`.
"""
