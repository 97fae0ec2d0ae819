"""Programs that serve one environment as MCP tools, by the Python that has the environment's package (3.10 or newer).

They import the standard library, each other and that package, nothing of ours and no MCP SDK. Start with `protocol`.
"""
