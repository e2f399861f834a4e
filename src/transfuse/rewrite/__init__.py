"""Changes single expressions of a forward's source and compiles it in place of the original."""
