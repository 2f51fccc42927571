"""Platforms that start the processes of a run on many machines: `cosmos-rl launch FILE --on slurm`.

`cli` calls it. It writes and submits text, and imports neither torch nor the controller.
"""
