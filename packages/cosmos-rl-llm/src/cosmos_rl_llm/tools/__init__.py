"""Tools: functions that the model calls in an episode.

calls         the turn of a model -> text, thoughts and calls, in the format of its chat template
formats       those formats
"""
