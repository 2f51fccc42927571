"""Programs that people operate around a run: clusters, dashboard, doctor, migrate, the reward service.

Only `cli` imports it, and other packages for what they add to its commands. It may import everything else of core.
"""
