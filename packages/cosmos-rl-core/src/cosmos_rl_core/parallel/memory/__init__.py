"""Trades of time for memory: activation checkpointing and offload, float8."""
