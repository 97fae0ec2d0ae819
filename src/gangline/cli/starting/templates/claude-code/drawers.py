"""An MCP server with one tool, which runs in Claude Code's sandbox."""

import json
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("drawers")


@server.tool()
def open_drawer(name: str) -> str:
    """Open a drawer; returns the word in it."""
    return json.loads(Path(sys.argv[1]).read_text()).get(name, "There is no such drawer.")


server.run()
