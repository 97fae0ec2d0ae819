"""Tools of MCP servers, and of environments. Start with `servers`."""
