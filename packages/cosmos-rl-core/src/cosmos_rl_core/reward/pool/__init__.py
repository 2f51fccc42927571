"""Rewards in worker processes that a deadline kills and replaces: for `own_process` rewards and the reward service."""
