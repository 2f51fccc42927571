"""Runs programs that a model has written, apart from this process and from this machine's files and network.

`sandbox.py` is for callers; `inside` has the programs of its own interpreter; `rewards/code.py` is the reward.
"""
