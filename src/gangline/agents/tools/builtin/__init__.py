"""Tools that act in the sandbox through the session's action server, and the tools `think` and `submit`.

Each module is one tool: its arguments as a struct, from which the schema is generated, and its class. Start with
`think`.
"""
