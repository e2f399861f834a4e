"""Starts, watches and talks to the process that runs the model."""
