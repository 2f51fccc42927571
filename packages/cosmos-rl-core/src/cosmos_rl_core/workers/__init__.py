"""Worker processes: entry point (`main`), roles (`policy`, `rollout`), ranks of a replica, client of the controller.

A role is a class with `run` and `pulse` (`main.Role`). Started by `launch`, or manually with `cosmos-rl worker`.
"""
