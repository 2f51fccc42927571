"""`generate` and `evaluate`: engines in separate processes, without a trainer.

Used by `cli` and by `cosmos_rl_core.generate` and `.evaluate`.
"""
