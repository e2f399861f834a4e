"""Makes vectors of texts and ranks them by a question; a model that generates lends its hidden states.

python examples/embed_and_rank.py [MODEL]
"""

from __future__ import annotations

import sys

from transfuse import LLM

TEXTS = ["The cat sits outside.", "Stocks fell by two percent.", "A man is playing guitar."]
QUESTION = "Where is the cat?"


def main(model: str | None = None) -> None:
    """Loads `model`, an embedding model or any other folder, and prints the texts, the best first."""
    with LLM(model, runner="pooling") as llm:
        print(f"Runs {llm.model_impl}; pools by {llm.summary()['pooling']}")
        vectors = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
        print(f"{len(vectors)} vectors of {len(vectors[0])} numbers")
        scores = [output.outputs.score for output in llm.score(QUESTION, TEXTS, use_tqdm=False)]
        for score, text in sorted(zip(scores, TEXTS, strict=True), reverse=True):
            print(f"{score:6.3f}  {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
