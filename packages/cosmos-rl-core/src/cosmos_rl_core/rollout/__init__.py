"""The work of a rollout replica: lease a prompt, generate, score, deliver, switch weights; and the staleness window.

Used by `workers.rollout` and, for the arithmetic of the window, by the ledger. Imports reward, algorithms and types.
"""
