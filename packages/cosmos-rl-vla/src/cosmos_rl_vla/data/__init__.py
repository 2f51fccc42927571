"""Demonstrations in LeRobot's format: readers, columns, caches."""
