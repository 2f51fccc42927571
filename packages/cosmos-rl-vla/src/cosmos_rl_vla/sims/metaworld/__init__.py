"""MetaWorld: tasks, scenes, the simulator."""
