"""The least time that this machine allows a model's steps, from what it is measured to read and multiply."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from transfuse.bench.latency import Point, Sample
from transfuse.bench.report import Condition, Measure
from transfuse.bench.stats import distribution
from transfuse.errors import ConfigError
from transfuse.inspect.costs import Cost, ModelCosts, model_costs
from transfuse.inspect.subject import build_on_meta, config_subject
from transfuse.models.loader import load_config

if TYPE_CHECKING:
    from transfuse.models.resolve import ModelSource

_READ_BYTES = 2**30  # far out of any cache
_PRODUCT = (1024, 2048, 4096)  # M, K, N: large enough that arithmetic bounds it
_REPEATS = 7
# Beside the served dtype, for comparison with other machines.
_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the machine, as its best of several measurements: what it can do, not what it did while others worked.

    Attributes:
        bytes_per_s: read from memory, by all threads together.
        flops_per_s: of large products of matrices, by dtype.
    """

    bytes_per_s: float
    flops_per_s: dict[str, float]

    def conditions(self) -> dict[str, Condition]:
        """To be told beside what was measured."""
        peaks: dict[str, Condition] = {
            f"{dtype} GFLOP/s": round(rate / 1e9, 1) for dtype, rate in self.flops_per_s.items()
        }
        return {"memory read GB/s": round(self.bytes_per_s / 1e9, 1), **peaks}

    def better(self, other: Limits) -> Limits:
        """The best of both: the machine may have been busy for one of them."""
        rates = {name: max(rate, other.flops_per_s[name]) for name, rate in self.flops_per_s.items()}
        return Limits(max(self.bytes_per_s, other.bytes_per_s), rates)


def measure_limits(dtype: str, *, read_bytes: int = _READ_BYTES, product: tuple[int, int, int] = _PRODUCT) -> Limits:
    """Measure this machine, with as many threads as torch has; it takes two seconds.

    Args:
        dtype: that a model is served in.
        read_bytes: size of what is read.
        product: rows of the input, its columns, and columns of the result.
    """
    m, k, n = product
    dtypes = {str(kind).removeprefix("torch."): kind for kind in (getattr(torch, dtype), *_DTYPES)}
    source = torch.arange(read_bytes // 4, dtype=torch.int32)  # zeros might all be read from one page
    with torch.inference_mode():
        rates = {}
        for name, kind in dtypes.items():
            x, w = torch.randn(m, k).to(kind), torch.randn(n, k).to(kind)
            rates[name] = _best_rate(2 * m * k * n, partial(F.linear, x, w))
        return Limits(_best_rate(source.nbytes, source.max), rates)


def _best_rate(work: float, run: Callable[[], object]) -> float:
    run()
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return work / best


@dataclass(frozen=True, slots=True)
class Floor:
    """What a model's tokens cost at least.

    Attributes:
        costs: of a token in each of its parts.
        head: of the layer that makes logits, which prefill computes for its last token alone.
        limits: of the machine.
        dtype: that the model is served in.
        saved_bytes: of weights, that are not read since their exponents are coded.
    """

    costs: ModelCosts
    head: Cost
    limits: Limits
    dtype: str
    saved_bytes: int = 0

    def decode_seconds(self, batch_size: int, context: int) -> float:
        """Of a step that brings each of `batch_size` requests a token, with `context` positions before and with it."""
        total = self.costs.total
        num_bytes = total.weight_bytes - self.saved_bytes + batch_size * self.costs.cache_bytes(context)
        return self._seconds(num_bytes, batch_size * (total.flops + self.costs.attention_flops(context)))

    def prefill_seconds(self, num_prompts: int, length: int) -> float:
        """Of the prompts' tokens, computed at once, and one token of logits for each."""
        attention = sum(self.costs.attention_flops(context) for context in range(1, length + 1))
        rest = self.costs.total.flops - self.head.flops
        flops = num_prompts * (length * rest + self.head.flops + attention)
        return self._seconds(self.costs.total.weight_bytes - self.saved_bytes, flops)

    def _seconds(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.limits.bytes_per_s, flops / self.limits.flops_per_s[self.dtype])

    def shares(self, point: Point, samples: Sequence[Sample]) -> dict[str, Measure]:
        """How near a point's steps came to the floor: 1 would be at it."""
        prefill = self.prefill_seconds(point.batch_size, point.input_len)
        # The mean over the steps, whose context grows by one each.
        contexts = range(point.input_len + 1, point.input_len + point.output_len)
        steps = [self.decode_seconds(point.batch_size, context) for context in contexts]
        return {
            "prefill_floor_share": distribution(prefill / sample.prefill_seconds for sample in samples),
            "decode_floor_share": distribution(
                sum(steps) * sample.num_decoded / (len(steps) * point.batch_size) / sample.decode_seconds
                for sample in samples
                if sample.num_decoded
            ),
        }


def model_floor(source: ModelSource, dtype: str, limits: Limits, *, trust_remote_code: bool) -> Floor:
    """The floor of a model, from its config.

    Raises:
        ConfigError: its forward cannot be recorded, so that its costs are not known.
    """
    config = load_config(source, trust_remote_code=trust_remote_code)
    module = build_on_meta(config, getattr(torch, dtype), source, trust_remote_code=trust_remote_code)
    recording = config_subject(source.name, module).record()
    if recording.trace.error is not None:
        raise ConfigError(f"--roofline: the costs of {source.name} are not known: {recording.trace.error}")
    costs = model_costs(recording.trace, recording.row, recording.attention)
    return Floor(costs, _head(module, costs), limits, dtype)


def _head(module: torch.nn.Module, costs: ModelCosts) -> Cost:
    get_head = getattr(module, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    paths = (path for path, part in module.named_modules() if part is head)
    return costs.by_path.get(next(paths, ""), Cost()) if head is not None else Cost()
