"""Embedding texts of mixed lengths, beside Transformers on padded batches, in one interleaved run.

python -m benchmarks.embeddings FOLDER [--num-texts 256] [--repeats 5] [--dtype float32]

Transformers gets what sentence-transformers gives it: texts sorted by length, the longest first, 32 in a batch, padded
to the longest of each, the mean taken over the tokens by the mask. Both embed the same token ids: no tokenizer is
measured. The process' own time is told too, since neighbours on a machine leave that alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from transfuse import LLM

BATCH_SIZE = 32
Texts = list[list[int]]
Way = Callable[[Texts], torch.Tensor]


def main() -> None:
    """Print tokens a second of both, the median of the ratios, and the largest difference of their vectors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of an encoder whose vectors are normalised means")
    parser.add_argument("--num-texts", type=int, default=256)
    parser.add_argument("--lengths", choices=LENGTHS, nargs="+", default=list(LENGTHS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    model = AutoModel.from_pretrained(arguments.folder, dtype=getattr(torch, arguments.dtype)).eval()
    with LLM(arguments.folder, dtype=arguments.dtype, show_progress=False) as llm:
        print(f"{llm.model_impl}, {llm.summary()['kernels']}; {torch.get_num_threads()} threads; {arguments.dtype}")
        for name in arguments.lengths:
            texts = _texts(arguments.folder, arguments.num_texts, LENGTHS[name])
            _report(name, texts, arguments.repeats, lambda t: _ours(llm, t), lambda t: _theirs(model, t))


LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "queries": lambda rng: rng.randint(5, 20),
    "sentences": lambda rng: min(250, max(4, round(rng.lognormvariate(3.2, 0.6)))),
    "paragraphs": lambda rng: rng.randint(60, 250),
    "mixed": lambda rng: rng.choice((rng.randint(4, 20), rng.randint(100, 250))),
}


def _texts(folder: Path, count: int, length: Callable[[random.Random], int]) -> Texts:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(0)
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    size = len(tokenizer)
    return [[first, *(rng.randrange(size // 2, size) for _ in range(length(rng))), last] for _ in range(count)]


def _report(name: str, texts: Texts, repeats: int, ours: Way, theirs: Way) -> None:
    difference = (ours(texts) - theirs(texts)).abs().max().item()  # this warms up, too
    pairs = [(_seconds(ours, texts), _seconds(theirs, texts)) for _ in range(repeats)]
    num_tokens = sum(map(len, texts))
    for kind, index in (("clock", 0), ("process", 1)):
        rates = [num_tokens / statistics.median(pair[way][index] for pair in pairs) for way in (0, 1)]
        ratio = statistics.median(pair[1][index] / pair[0][index] for pair in pairs)
        print(
            f"{name:10} {kind:7} {rates[0]:8.0f} tokens/s   Transformers {rates[1]:8.0f}   {ratio:.2f}   "
            f"difference {difference:.0e}",
            flush=True,
        )


def _seconds(way: Way, texts: Texts) -> tuple[float, float]:
    clock, process = time.perf_counter(), time.process_time()
    way(texts)
    return time.perf_counter() - clock, time.process_time() - process


def _ours(llm: LLM, texts: Texts) -> torch.Tensor:
    outputs = llm.embed([{"prompt_token_ids": ids} for ids in texts], use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


@torch.inference_mode()
def _theirs(model: PreTrainedModel, texts: Texts) -> torch.Tensor:
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    found: list[torch.Tensor] = [torch.empty(0)] * len(texts)
    for start in range(0, len(order), BATCH_SIZE):
        part = order[start : start + BATCH_SIZE]
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad([torch.tensor(texts[index]) for index in part], batch_first=True)
        mask = pad([torch.ones(len(texts[index]), dtype=torch.int64) for index in part], batch_first=True)
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        weights = mask.unsqueeze(-1).float()
        means = (hidden * weights).sum(1) / weights.sum(1)
        for index, vector in zip(part, torch.nn.functional.normalize(means, dim=-1), strict=True):
            found[index] = vector
    return torch.stack(found)


if __name__ == "__main__":
    main()
