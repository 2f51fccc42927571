"""ManiSkill: tasks, scenes, the simulator."""
