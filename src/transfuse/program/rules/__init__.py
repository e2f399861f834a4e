"""Which kernels compute a recorded operation: one file for each kind of operation."""

from transfuse.program.rules import attention, elementwise, norms, products, sums
from transfuse.program.rules.base import RULES

__all__ = ["RULES", "attention", "elementwise", "norms", "products", "sums"]
