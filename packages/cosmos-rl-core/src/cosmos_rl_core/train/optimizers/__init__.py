"""Optimizers by name, and those that torch does not have as a policy needs them: Muon over shards, stochastic rounding.

Imports core's interfaces, types and `parallel`, no other part of `train`.
"""
