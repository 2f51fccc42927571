"""The work of a rollout replica: lease a prompt, generate, score, deliver, switch weights. Also the staleness window.

Used by `workers.rollout`, and by the ledger for the staleness window. Imports reward, algorithms and types.
"""
