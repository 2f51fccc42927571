"""How one policy replica is spread over its ranks, with torch's own parts. `dims` is arithmetic and needs no torch."""
