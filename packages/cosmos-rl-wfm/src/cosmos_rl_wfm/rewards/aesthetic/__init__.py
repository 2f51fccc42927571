"""An aesthetic score: CLIP features, a head, and how to train one."""
