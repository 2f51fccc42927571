"""Recording a simulator's scripted expert as a LeRobot dataset."""
