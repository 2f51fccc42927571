"""Which rank sends which box to whom: pure functions with bounds."""
