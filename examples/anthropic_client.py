"""Anthropic's messages with the official client, streamed, and what they cost.

transfuse serve MODEL --served-model-name my-model
python examples/anthropic_client.py http://127.0.0.1:8000 my-model
"""

from __future__ import annotations

import sys

from anthropic import Anthropic


def main(url: str = "http://127.0.0.1:8000", model: str = "my-model") -> None:
    """Asks a question."""
    with (
        Anthropic(base_url=url, api_key="none") as client,
        client.messages.stream(
            model=model,
            system="Answer in one sentence.",
            messages=[{"role": "user", "content": "Name a river in France."}],
            max_tokens=64,
        ) as stream,
    ):
        for text in stream.text_stream:
            print(text, end="", flush=True)
        message = stream.get_final_message()
        print()
        print(f"{message.usage.output_tokens} tokens, ended by {message.stop_reason}")


if __name__ == "__main__":
    main(*sys.argv[1:])
