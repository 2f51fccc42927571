"""Who sends what to whom, and how near that is to the least possible."""
