"""The ledger under hundreds of simulated replicas, lost messages and deaths."""
