"""A model's forward as a straight line of ops: recorded, lowered onto native kernels, and replayed."""
