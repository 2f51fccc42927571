"""Processes that die in the middle of a sync, and what becomes of the others."""
