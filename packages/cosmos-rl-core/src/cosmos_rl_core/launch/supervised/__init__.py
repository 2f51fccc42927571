"""`cosmos-rl run`: a launcher owns the worker processes, and a controller that dies is started again."""
