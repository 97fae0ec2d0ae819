"""Programs that serve one environment as MCP tools. They run in the Python (3.10 or newer) that has its package.

They import only the standard library, each other and that package; no Gangline, no MCP SDK. Start with `protocol`.
"""
