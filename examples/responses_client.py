"""OpenAI's Responses with the official client: a streamed answer, then one that goes on from it by its id.

transfuse serve MODEL --served-model-name my-model
python examples/responses_client.py http://127.0.0.1:8000 my-model
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000", model: str = "my-model") -> None:
    """Asks two questions; the server remembers the first one."""
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        first = ""
        for event in client.responses.create(
            model=model, input="Name a river in France.", max_output_tokens=64, stream=True
        ):
            if event.type == "response.created":
                first = event.response.id
            elif event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
        print()
        second = client.responses.create(
            model=model, input="And one in Egypt?", previous_response_id=first, max_output_tokens=64
        )
        print(second.output_text)
        assert second.usage is not None
        cached = second.usage.input_tokens_details.cached_tokens
        print(f"{cached} of {second.usage.input_tokens} prompt tokens came from the cache")


if __name__ == "__main__":
    main(*sys.argv[1:])
