"""The trainable side: packed sequences, attention, log-probabilities, parallel layouts, LoRA.

Imports model and data; used by the domain.
"""
