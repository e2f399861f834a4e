"""The paged cache: which blocks exist, who holds them, and the tensors behind them."""
