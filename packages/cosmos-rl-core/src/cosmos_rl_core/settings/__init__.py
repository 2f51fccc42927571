"""Strict pydantic models and the problems of a value: the base that every section of a recipe is built on.

Used by all folders; imports errors and plugins alone.
"""
