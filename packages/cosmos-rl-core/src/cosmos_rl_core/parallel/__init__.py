"""Meshes and the parts common to all axes: dimensions, pipeline stages, gradients, memory estimates, LoRA.

`axes` has one file for each way to cut a model, `memory` the trades of time for memory.
"""
