"""Strict pydantic models and validation problems: the base of every section of a recipe.

Used by all folders; imports only errors and plugins.
"""
