"""Worker processes: main, roles (policy, rollout), ranks of a replica, and their end of the control channel.

Started by `launch`, or by hand with `cosmos-rl worker`.
"""
