"""An MCP server of tests, which remembers what it was told."""

import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def note(text: str, times: int = 1) -> str:
    """Keeps a text."""
    if text == "die":
        os._exit(3)
    if text == "no":
        raise ToolError("that is not kept")
    notes.extend([text] * times)
    return ",".join([*sys.argv[1:], *filter(None, [os.environ.get("WORD")]), *notes])


server.run()
