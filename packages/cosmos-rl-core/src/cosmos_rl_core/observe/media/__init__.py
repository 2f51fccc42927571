"""Samples as pictures and clips: grids, films, a page for each step."""
