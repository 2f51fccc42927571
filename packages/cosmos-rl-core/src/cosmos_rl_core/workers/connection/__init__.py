"""A worker's connection to the controller, opened again when it closes. Imports no other module of the workers."""
