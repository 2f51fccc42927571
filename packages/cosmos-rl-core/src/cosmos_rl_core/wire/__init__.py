"""Authenticated, length-prefixed msgspec frames over TCP or a Unix socket, in asyncio.

Used by the control channel, the spool, generation and simulator processes, and the weight sync.
Imports only `errors` and `types`, whose rollout groups `payload` encodes.
"""
