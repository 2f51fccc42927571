"""What a run leaves to look at: console, metrics sinks, trace, rollouts, media.

Imports types and errors; used by `launch`, `workers` and `inference`.
"""
