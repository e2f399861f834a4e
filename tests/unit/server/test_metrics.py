from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.server.asgi import IdleLLM
from transfuse.messages import CoreStats
from transfuse.outputs import CompletionOutput, RequestMetrics, RequestOutput
from transfuse.server.metrics import Metrics

# What dashboards made for vLLM ask for, with the suffix that Prometheus gives each kind.
GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
COUNTERS = {
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "core_restarts",
}
HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
}


def read(metrics: Metrics) -> dict[str, float]:
    """All samples, as `name{labels}`."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def output(**times: Any) -> RequestOutput:
    return RequestOutput(
        "r",
        None,
        [1, 2, 3],
        [
            CompletionOutput(0, token_ids=[4, 5], finish_reason="stop"),
            CompletionOutput(1, token_ids=[6], finish_reason="length"),
            CompletionOutput(2),
        ],
        metrics=RequestMetrics(**times) if times else None,
    )


def test_names_and_kinds_are_those_of_vllm() -> None:
    metrics = Metrics(IdleLLM())  # type: ignore[arg-type]
    metrics.observe(output())
    families = {family.name: family.type for family in text_string_to_metric_families(metrics.text().decode())}
    assert {name for name, kind in families.items() if kind == "gauge"} >= {f"transfuse:{name}" for name in GAUGES}
    assert {name for name, kind in families.items() if kind == "counter"} >= {f"transfuse:{name}" for name in COUNTERS}
    assert {name for name, kind in families.items() if kind == "histogram"} == {
        f"transfuse:{name}" for name in HISTOGRAMS
    }
    samples = read(metrics)
    assert all(f"transfuse:{name}_total" in samples for name in COUNTERS - {"request_success"})


def test_the_engines_numbers_are_those_of_its_last_report() -> None:
    llm = IdleLLM()
    metrics = Metrics(llm)  # type: ignore[arg-type]
    assert read(metrics)["transfuse:num_requests_running"] == 0
    llm.stats = CoreStats(
        num_steps=7,
        num_step_tokens=50,
        num_step_prompt_tokens=30,
        num_running=3,
        num_waiting=2,
        kv_cache_usage=0.25,
        prefix_cache_queries=100,
        prefix_cache_hits=40,
        num_preemptions=1,
    )
    llm.num_restarts, llm.state = 2, "restarting"
    samples = read(metrics)
    assert {name: samples[f"transfuse:{name}"] for name in (*GAUGES, "engine_ready")} == {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.25,
        "engine_ready": 0,
    }
    assert samples["transfuse:prefix_cache_queries_total"] == 100
    assert samples["transfuse:prefix_cache_hits_total"] == 40
    assert samples["transfuse:num_preemptions_total"] == 1
    assert samples["transfuse:core_restarts_total"] == 2
    assert samples["transfuse:engine_steps_total"] == 7
    assert samples["transfuse:engine_step_tokens_total"] == 50
    assert samples["transfuse:engine_step_prompt_tokens_total"] == 30


def test_an_answer_is_taken_apart_in_seconds() -> None:
    metrics = Metrics(IdleLLM())  # type: ignore[arg-type]
    metrics.observe(output(arrival_time=10.0, first_scheduled_time=10.5, first_token_time=12.0, finished_time=15.0))
    samples = read(metrics)
    for name, seconds in {
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 1.5,
        "time_to_first_token_seconds": 2.0,
        "request_decode_time_seconds": 3.0,
        "e2e_request_latency_seconds": 5.0,
    }.items():
        assert samples[f"transfuse:{name}_sum"] == pytest.approx(seconds)
        assert samples[f"transfuse:{name}_count"] == 1
    assert samples["transfuse:prompt_tokens_total"] == 3
    for reason in ("stop", "length", "abort"):
        assert samples[f"transfuse:request_success_total{{finished_reason={reason}}}"] == 1


def test_an_answer_that_never_began_has_no_times() -> None:
    metrics = Metrics(IdleLLM())  # type: ignore[arg-type]
    metrics.observe(output(arrival_time=1.0))
    samples = read(metrics)
    assert all(samples[f"transfuse:{name}_count"] == 0 for name in HISTOGRAMS)


def test_labels_do_not_grow_with_what_clients_send() -> None:
    metrics = Metrics(IdleLLM())  # type: ignore[arg-type]
    for number in range(100):
        metrics.count_http_request(f"METHOD{number}", "unmatched", 404)
    assert read(metrics)["transfuse:http_requests_total{method=other,route=unmatched,status=404}"] == 100


def test_servers_share_no_numbers() -> None:
    first, second = (Metrics(IdleLLM()) for _ in range(2))  # type: ignore[arg-type]
    first.count_output_tokens(5)
    assert read(first)["transfuse:generation_tokens_total"] == 5
    assert read(second)["transfuse:generation_tokens_total"] == 0
    assert not re.search(rb"python_gc|process_", first.text())
