"""An aesthetic score: CLIP features, a head, and its training."""
