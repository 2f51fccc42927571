"""`cosmos-rl run`: a launcher keeps the worker processes, and a controller that dies is started again."""
