"""Advantages, losses, filters and their table: functions of values, independent of the domain.

Used by `rollout` (rules of a group), `train` (objective of a batch) and `recipe`; imports types and settings.
"""
