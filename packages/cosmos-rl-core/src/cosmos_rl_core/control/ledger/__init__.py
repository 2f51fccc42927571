"""The ledger: a pure state machine of samples, members, versions and votes.

events -> records (durable changes of state) + outputs (messages to send). No clock, no I/O. Used by `control`.
"""
