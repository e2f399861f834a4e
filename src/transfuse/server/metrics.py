"""What Prometheus reads: vLLM's names under `transfuse:`, all times in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from transfuse.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput

if TYPE_CHECKING:
    from transfuse.async_llm import AsyncLLM

PREFIX: Final = "transfuse:"
CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

# From a small model's token to a long answer on a slow machine.
_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
_FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_REQUEST_BUCKETS = (
    0.01,
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    20.0,
    30.0,
    60.0,
    120.0,
    300.0,
    900.0,
)
# Clients may send any word as a method; labels must not grow with them.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """Counters and histograms of one server, with the engine's own numbers read when they are asked for.

    Args:
        llm: whose numbers the gauges show.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineNumbers(llm))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._request_success = self._counter("request_success", "Continuations that ended.", "finished_reason")
        self._http_requests = self._counter("http_requests", "HTTP requests answered.", "method", "route", "status")
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS
        )
        self._token_gap = self._histogram(
            "inter_token_latency_seconds", "From one piece of an answer to the next.", _TOKEN_BUCKETS
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _REQUEST_BUCKETS)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to the first step.", _REQUEST_BUCKETS)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _REQUEST_BUCKETS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the end.", _REQUEST_BUCKETS
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)

    def observe(self, output: RequestOutput) -> None:
        """Take in an answer that has ended, or was given up by its client."""
        self._prompt_tokens.inc(len(output.prompt_token_ids))
        for one in output.outputs:
            self._request_success.labels(one.finish_reason or "abort").inc()
        if (times := output.metrics) is None:
            return
        _observe(self._queue, times.queue_seconds)
        _observe(self._prefill, times.prefill_seconds)
        _observe(self._ttft, times.ttft_seconds)
        _observe(self._decode, times.decode_seconds)
        _observe(self._e2e, times.total_seconds)

    def observe_text(self, output: EmbeddingRequestOutput | ScoringRequestOutput) -> None:
        """Take in a text that a vector or a score was made of."""
        self._prompt_tokens.inc(len(output.prompt_token_ids))
        self._request_success.labels("stop").inc()
        if (times := output.metrics) is not None:
            _observe(self._queue, times.queue_seconds)
            _observe(self._e2e, times.total_seconds)

    def observe_token_gap(self, seconds: float) -> None:
        """Take in the time between two pieces of an answer."""
        self._token_gap.observe(seconds)

    def count_output_tokens(self, num_tokens: int) -> None:
        """Take in new tokens of an answer."""
        self._generation_tokens.inc(num_tokens)

    def count_http_request(self, method: str, route: str, status: int) -> None:
        """Take in a response; `route` is a template, never a path that a client made up."""
        self._http_requests.labels(method if method in _METHODS else "other", route, str(status)).inc()

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineNumbers(Collector):
    """Reads the engine's last report."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def collect(self) -> Iterator[Metric]:
        stats = self._llm.stats
        yield _gauge("num_requests_running", "Continuations that hold cache blocks.", stats.num_running)
        yield _gauge("num_requests_waiting", "Continuations that wait to be admitted.", stats.num_waiting)
        yield _gauge("kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1.", stats.kv_cache_usage)
        yield _gauge("engine_ready", "1 while requests are served, else 0.", float(self._llm.state == "ready"))
        yield _counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries
        )
        yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits)
        yield _counter("num_preemptions", "Times a request lost its blocks.", stats.num_preemptions)
        yield _counter("engine_steps", "Steps computed.", stats.num_steps)
        yield _counter("engine_step_tokens", "Tokens that went through the model in steps.", stats.num_step_tokens)
        yield _counter("engine_step_prompt_tokens", "Those of prompts among them.", stats.num_step_prompt_tokens)
        yield _counter("core_restarts", "Times the process with the model was started again.", self._llm.num_restarts)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _observe(histogram: Histogram, seconds: float | None) -> None:
    if seconds is not None:
        histogram.observe(seconds)
