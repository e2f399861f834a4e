"""Two turns of a conversation, the second streamed; the model needs a chat template.

python examples/chat.py [MODEL]
"""

from __future__ import annotations

import sys

from transfuse import LLM, SamplingParams


def main(model: str | None = None) -> None:
    """Loads `model` (None: the default model) and asks it two questions."""
    params = SamplingParams(temperature=0, max_tokens=64)
    messages = [{"role": "user", "content": "Name a river in France."}]
    with LLM(model) as llm:
        answer = llm.chat(messages, params)[0].outputs[0].text
        print("model:", answer)

        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And one in Egypt?"}]
        print("model: ", end="")
        num_printed = 0
        for output in llm.stream_chat(messages, params):
            text = output.outputs[0].text  # the whole text so far
            print(text[num_printed:], end="", flush=True)
            num_printed = len(text)
        print()
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens came from the cache")


if __name__ == "__main__":
    main(*sys.argv[1:])
