"""A run on this machine: check, plan, place workers, watch, report.

Used by `cli` and by `cosmos_rl_core.run`.
"""
