"""A run on this machine: check, plan, start workers, monitor, report.

Used by `cli` and by `cosmos_rl_core.run`.
"""
