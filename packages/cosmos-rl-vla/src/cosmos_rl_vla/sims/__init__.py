"""Simulators behind one protocol (`base.Simulator`); the pool that runs them in processes."""
