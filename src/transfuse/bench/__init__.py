"""Measures speed: of the engine in this process, of servers, of starts, and of other engines beside it."""
