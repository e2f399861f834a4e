"""Sends a prompt as token ids and shows the log-probabilities of the answer's tokens.

python examples/token_ids_and_logprobs.py [MODEL]
"""

from __future__ import annotations

import sys

from transfuse import LLM, SamplingParams


def main(model: str | None = None) -> None:
    """Loads `model` (None: the default model) and prints a line for each generated token."""
    with LLM(model) as llm:
        ids = llm.get_tokenizer().encode("The capital of France is")
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
        output = llm.generate({"prompt_token_ids": ids}, params)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None, "asked for above"
    for token, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
        shown = ", ".join(f"{each.decoded_token!r} {each.logprob:.2f}" for each in candidates.values())
        print(f"{token:>6}  {shown}")
    print("sum:", completion.cumulative_logprob)


if __name__ == "__main__":
    main(*sys.argv[1:])
