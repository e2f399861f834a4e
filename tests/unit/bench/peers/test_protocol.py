from __future__ import annotations

import io
import json
import sys

import pytest

from transfuse.bench.peers.protocol import MARK, run, runner_parser, serve
from transfuse.bench.peers.workloads import Prompt, prompts_of


def test_a_runner_answers_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[Prompt]] = []

    def generate(prompts: list[Prompt], max_tokens: list[int]) -> list[int]:
        asked.append(prompts)
        return max_tokens

    out = io.StringIO()
    monkeypatch.setattr(sys, "__stdout__", out)
    commands = [{"w": "W1", "rep": 3, "ids": [64, 512]}, {"w": "W4", "rep": 0, "ids": [64, 512]}]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{json.dumps(command)}\n" for command in commands)))
    serve(lambda: generate)
    start, first, second = (json.loads(line.removeprefix(MARK)) for line in out.getvalue().splitlines() if line)
    assert start["startup_s"] > 0 and start["rss_mb"] > 1
    assert (first["w"], first["rep"]) == ("W1", 3)
    assert {"ttft_ms", "decode_tps", "other_cpu", "rss_mb"} <= first.keys()
    assert "secs" in second
    assert [call.prompts for call in prompts_of("W1", 3, (64, 512))] == asked[1:3]


def test_an_engine_that_stops_early_is_not_timed() -> None:
    with pytest.raises(RuntimeError, match="W1: asked for"):
        run(lambda prompts, max_tokens: [0] * len(prompts), "W1", 0, (64, 512))


def test_every_runner_takes_threads() -> None:
    assert runner_parser("x").parse_args([]).num_threads >= 1
    assert runner_parser("x").parse_args(["--num-threads", "3"]).num_threads == 3
