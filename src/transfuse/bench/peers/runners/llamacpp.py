"""llama.cpp through a llama-server of its own: 32 slots, one cache for all, continuous batching, prompt cache."""

from __future__ import annotations

import argparse
import atexit
import http.client
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from transfuse.bench.peers.protocol import Generate, runner_parser, serve
from transfuse.bench.peers.workloads import Prompt

NUM_SLOTS = 32
HOST = "127.0.0.1"
MIN_SHARED_PREFIX = 512


def start_server(args: argparse.Namespace, port: int) -> subprocess.Popen[bytes]:
    """Start llama-server; it ends with this process, and prints where this process prints errors."""
    threads = str(args.num_threads)
    command = [args.server, "-m", args.model, "--port", str(port), "-t", threads, "-tb", threads]
    command += ["-c", "32768", "-np", str(NUM_SLOTS), "--kv-unified", "-b", "2048", "-ub", "512", "--no-warmup"]
    server = subprocess.Popen([*command, *args.server_args], stdout=sys.stderr, stderr=sys.stderr)
    atexit.register(server.terminate)
    return server


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Return when the server answers; raise if it ended."""
    while not _is_healthy(port):
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with {server.returncode}; its messages are above")
        time.sleep(0.02)


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:  # not listening yet
        return False
    finally:
        connection.close()


def complete(port: int, prompt: Prompt, max_tokens: int) -> int:
    """Number of tokens that the server generated."""
    body = dict(
        prompt=prompt,
        n_predict=max_tokens,
        temperature=0,
        top_k=1,
        samplers=["top_k"],
        ignore_eos=True,
        cache_prompt=True,
    )
    connection = http.client.HTTPConnection(HOST, port, timeout=600)
    try:
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if "tokens_predicted" not in answer:
        raise RuntimeError(f"llama-server answered {answer}")
    return int(answer["tokens_predicted"])


def load(args: argparse.Namespace) -> Generate:
    """Start the server and return a function that sends it requests, all at once."""
    port = free_port()
    wait_until_ready(start_server(args, port), port)

    def generate(prompts: list[Prompt], max_tokens: list[int]) -> list[int]:
        num_first = 1 if args.seed_prefix and _share_prefix(prompts) else 0
        requests = list(zip(prompts, max_tokens, strict=True))
        counts = [complete(port, *request) for request in requests[:num_first]]
        with ThreadPoolExecutor(max_workers=len(requests)) as pool:
            return counts + list(pool.map(lambda request: complete(port, *request), requests[num_first:]))

    return generate


def _share_prefix(prompts: list[Prompt]) -> bool:
    prefix = prompts[0][:MIN_SHARED_PREFIX]
    shared = all(prompt[:MIN_SHARED_PREFIX] == prefix for prompt in prompts)
    return shared and len(prompts) > 1 and len(prefix) == MIN_SHARED_PREFIX


def main() -> None:
    """Parse the command line and serve."""
    parser = runner_parser(__doc__, epilog="Further arguments are handed to llama-server.")
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--server", required=True, help="path of llama-server")
    parser.add_argument(
        "--seed-prefix", action="store_true", help="let one of several alike prompts fill the cache first"
    )
    args, server_args = parser.parse_known_args()
    args.server_args = server_args
    serve(lambda: load(args))


if __name__ == "__main__":
    main()
