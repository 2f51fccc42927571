"""Simulators in processes of their own, with shared memory, time limits and restarts."""
