"""Meshes and what is the same on every axis: dimensions, pipeline stages, gradients, memory estimates, LoRA.

`axes` has one file for each way to cut a model, `memory` what trades time for memory.
"""
