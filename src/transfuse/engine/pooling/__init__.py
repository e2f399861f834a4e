"""Runs models that give a vector or a score for a whole text, beside those that generate."""
