"""Boxes in checkpoint coordinates: manifests of both sides."""
