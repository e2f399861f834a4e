"""Compares a served model with the original Transformers module, number by number."""
