"""The reward-hacking monitor: takes metrics of a run, returns warnings, rollbacks and stops.

Used by `recipe`, `workers` and `launch`; imports `settings`, `observe.sinks` and core's types.
"""
