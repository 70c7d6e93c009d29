"""Tools of a server of the Model Context Protocol, over its standard input and output."""

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from storage.errors import InputError
from tasks.environments.protocol import Observation, ToolError
from tasks.environments.tools import Tool, Tools

try:
    import mcp
except ModuleNotFoundError:
    raise InputError("the environment `mcp` needs the package of that name: pip install mcp") from None

_ANY = TypeAdapter(dict[str, Any])  # the server checks them


class McpTools(Tools):
    """The tools of a server, which is started for each conversation. A result that the server marks as an error is told
    to the policy; an error of the protocol, and the end of the server, is a failure of the environment."""

    # the server may remember something, so a conversation whose process was lost begins again
    replay = None  # pyright: ignore[reportAssignmentType] - the method is not offered

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None, **more: Any) -> None:
        """`env` are variables of the server beside PATH, HOME and the like; `more` are arguments of `Tools`. Raises
        InputError: there is no such command, or as `Tools`."""
        super().__init__([], **more)
        if not command or shutil.which(command[0]) is None:
            raise InputError(f"command = {list(command)} cannot be run: give a program on PATH and its arguments")
        given = None if env is None else dict(env)
        self._server = mcp.StdioServerParameters(command=command[0], args=list(command[1:]), env=given)

    async def reset(self, record: Mapping[str, Any], seed: int) -> Observation:
        self._client = await mcp.Client(self._server).__aenter__()  # it ends with this process
        page = await self._client.list_tools()
        found = list(page.tools)
        while page.next_cursor:
            page = await self._client.list_tools(cursor=page.next_cursor)
            found += page.tools
        self.offer([self._tool(one) for one in found])
        return await super().reset(record, seed)

    def _tool(self, found: mcp.Tool) -> Tool:
        about = {"name": found.name, "description": found.description or "", "parameters": found.input_schema}
        return Tool({"type": "function", "function": about}, _ANY, partial(self._asked, found.name))

    async def _asked(self, name: str, /, **arguments: Any) -> str:
        result = await self._client.call_tool(name, arguments)
        text = "\n".join(one.text if one.type == "text" else f"[{one.type}]" for one in result.content)
        if result.is_error:
            raise ToolError(text)
        return text
