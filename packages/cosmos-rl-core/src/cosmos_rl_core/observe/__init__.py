"""Output of a run for users: console, metrics sinks, trace, rollouts, media.

Imports types and errors; used by `launch`, `workers` and `inference`.
"""
