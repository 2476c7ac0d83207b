"""Tools that programs call, and what makes a tool of a function; each heavy library loads when it is first used."""

from modpo.programs.tools.calculator import calculator
from modpo.programs.tools.files import FileReader
from modpo.programs.tools.mcp import mcp_tools
from modpo.programs.tools.sandbox import PythonSandbox
from modpo.programs.tools.search import CorpusSearch
from modpo.programs.tools.tool import Tool, ToolResult, as_tool

__all__ = ["CorpusSearch", "FileReader", "PythonSandbox", "Tool", "ToolResult", "as_tool", "calculator", "mcp_tools"]
