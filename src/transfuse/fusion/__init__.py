"""Finds what can be fused in a model, rewrites the model's source so that it is, and says what was done and why."""
