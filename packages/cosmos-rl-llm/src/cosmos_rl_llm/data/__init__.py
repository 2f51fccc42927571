"""Rows, chat templates, masks of turns, and the collation of rollouts and supervised rows."""
