"""Checks before the start of a run: what its first minute would reveal, reported at once and within seconds.

`cosmos-rl check --deep`, `run` and `launch` call `launch.check.check(recipe, deep=True)`, which calls these. A domain
adds its own: `DomainBase.problems`.
"""
