"""What runs inside a Transformers model in place of its own cache and attention."""
