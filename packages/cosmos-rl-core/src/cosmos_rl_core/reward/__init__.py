"""Scores of rollouts: the rubric, a client of the reward service, retries.

Used by `rollout`; `service` is the server of the client.
"""
