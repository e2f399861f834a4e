"""Finds a model by name, builds it on `meta`, streams its weights into place and loads its tokenizer."""
