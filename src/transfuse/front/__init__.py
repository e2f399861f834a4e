"""The text side of the engine: requests checked and fanned out, answers gathered."""
