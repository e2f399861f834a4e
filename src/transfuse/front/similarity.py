"""How alike two vectors are, as sentence-transformers counts it: the higher, the more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from transfuse.errors import RequestError


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-12))


_KINDS: Final[dict[str, Callable[[np.ndarray, np.ndarray], float]]] = {
    "cosine": _cosine,
    "dot": lambda a, b: float(a @ b),
    "euclidean": lambda a, b: -float(np.linalg.norm(a - b)),
    "manhattan": lambda a, b: -float(np.abs(a - b).sum()),
}


def similarity(name: str) -> Callable[[bytes, bytes], float]:
    """What compares two vectors, each of float32 numbers, least significant byte first.

    Raises:
        RequestError: there is none of this name.
    """
    if name not in _KINDS:
        raise RequestError(f"The model's files compare by {name!r}; known are {', '.join(_KINDS)}.")
    kind = _KINDS[name]
    return lambda a, b: kind(_numbers(a), _numbers(b))


def _numbers(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<f4").astype(np.float64)
