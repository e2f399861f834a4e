"""HTTP in front of the engine: the only part that knows a web framework."""
