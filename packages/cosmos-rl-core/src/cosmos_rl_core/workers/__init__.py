"""Worker processes: entry point, roles (policy, rollout), ranks of a replica, clients of the controller.

Started by `launch`, or manually with `cosmos-rl worker`.
"""
