"""Galleries of samples: grids, videos, one page per step."""
