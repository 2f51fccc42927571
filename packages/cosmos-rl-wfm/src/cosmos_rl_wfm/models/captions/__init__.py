"""Text encoders: from a folder, from cached embeddings, from words."""
