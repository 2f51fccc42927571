"""The TOML recipe: its sections, the rules between them, loading, overrides.

A component owns its own section where it has one (`algorithms.config`, `parallel.config`, `monitor.config`). Used by
`assemble`, `workers`, `launch`, `inference` and `cli`.
"""
