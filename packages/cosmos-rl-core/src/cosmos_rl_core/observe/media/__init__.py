"""Samples as pictures and clips: grids, videos, a page for each step."""
