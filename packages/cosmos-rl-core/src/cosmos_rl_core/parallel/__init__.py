"""Meshes and the parts common to all axes: dimensions, pipeline stages, gradients, recomputation, float8, LoRA.

`axes` has one file for each way to cut a model, `offload` what waits in the host's memory.
"""
