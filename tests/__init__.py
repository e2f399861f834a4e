"""Tests, and the zoo of tiny models that they run on."""
