"""Tools: functions that the model calls in an episode.

calls         the turn of a model -> text, thoughts and calls, in the format of its chat template
formats       those formats
environment   the environment "tools"
tool          a tool, and its answer as text
functions     Python functions as tools
mcp           tools of MCP servers
"""
