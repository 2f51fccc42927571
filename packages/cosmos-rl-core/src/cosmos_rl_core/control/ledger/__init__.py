"""The ledger: a pure state machine of samples, members, versions and votes.

events -> records (what changed, durable) + outputs (what to send). No clock, no I/O.
"""
