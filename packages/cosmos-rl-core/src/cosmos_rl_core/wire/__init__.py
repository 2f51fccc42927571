"""Authenticated, length-prefixed msgspec frames over TCP or a Unix socket, in asyncio.

Used by the control channel and the spool; imports errors alone.
"""
