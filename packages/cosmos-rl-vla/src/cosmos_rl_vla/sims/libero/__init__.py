"""LIBERO: tasks, scenes, the simulator."""
