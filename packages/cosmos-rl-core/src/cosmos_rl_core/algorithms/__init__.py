"""Advantages, losses, filters and their table: functions of values that know no domain.

Used by `rollout` (rules of a group), `train` (objective of a batch) and `recipe`; imports types and settings.
"""
