"""A worker's connection to the controller, opened again when it closes, and the interface for other connections.

Imports no other module of the workers but `node`.
"""
