"""Checkpoints: capture, write, verify, restore, keep the best, export, resume.

Used by `workers.policy`, `launch`, `inference` and `cli`. Imports storage, train and parallel.
"""
