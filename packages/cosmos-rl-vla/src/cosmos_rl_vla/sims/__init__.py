"""Simulators behind one protocol (`base.Simulator`); a folder for each that takes several files."""
