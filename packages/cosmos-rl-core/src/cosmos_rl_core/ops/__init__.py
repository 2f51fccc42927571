"""Programs that people operate around a run: clusters, dashboard, doctor, migrate, the reward service.

Its `commands` are entry points; nothing imports it but other packages, for what they add to `migrate`. It may import
everything else of core.
"""
