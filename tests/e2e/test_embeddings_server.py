"""A tiny encoder behind HTTP: the official client, reranking and scoring, many texts at once, clients that leave."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from openai import OpenAI
from openai.types import CreateEmbeddingResponse
from schemathesis.generation import GenerationMode

from tests.e2e.server_thread import Server
from tests.pooling_models import add_pooling, hidden_states, save_model
from tests.sdk_types import checked
from transfuse import CapacityError, EngineClosedError, WrongTaskError
from transfuse.async_llm import AsyncLLM
from transfuse.server.settings import ServerSettings

MODEL, KEY = "tiny-encoder", "correct-key"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    about = {"prompts": {"query": "ask: ", "document": "say: "}}
    made = save_model("bert", tmp_path_factory.mktemp("served") / "bert", is_matryoshka=True)
    return add_pooling(made, "mean_tokens", about=about)


@pytest.fixture(scope="module", name="embedder")
def serve_embedder(folder: Path, settings: dict[str, Any], compiled_kernels: Path) -> Iterator[Server]:
    served = ServerSettings(
        served_model_names=(MODEL,), api_keys=(KEY,), max_num_seqs=16, max_queued_requests=16, port=0
    )
    with Server(AsyncLLM(folder, max_num_seqs=16, **settings), served) as running:
        yield running


@pytest.fixture(scope="module", name="official")
def official_client(embedder: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{embedder.url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module", name="http")
def plain_client(embedder: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=embedder.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as made:
        yield made


@pytest.fixture(autouse=True)
def _left_idle(embedder: Server) -> Iterator[None]:
    yield
    embedder.wait_idle()


def _post(http: httpx.Client, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()
    return found


def test_the_official_client_gets_the_models_vectors(embedder: Server, official: OpenAI, folder: Path) -> None:
    texts = ["a cat", "a tensor of shape and size", "x"]
    ids = [embedder.llm.tokenizer.encode(text) for text in texts]
    # The client asks for base64 unless it is told otherwise.
    answers = [
        official.embeddings.create(model=MODEL, input=texts),
        official.embeddings.create(model=MODEL, input=texts, encoding_format="float"),
        official.embeddings.create(model=MODEL, input=ids, user="me"),
    ]
    for answer in answers:
        assert answer.model == MODEL
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        for index, (item, hidden) in enumerate(zip(answer.data, hidden_states(folder, ids), strict=True)):
            expected = (hidden.mean(0) / hidden.mean(0).norm()).numpy()
            assert item.index == index
            np.testing.assert_allclose(item.embedding, expected, atol=1e-5)
    one = official.embeddings.create(model=MODEL, input=ids[0], dimensions=8)
    assert len(one.data) == 1
    np.testing.assert_allclose(np.linalg.norm(one.data[0].embedding), 1.0, atol=1e-5)
    assert len(one.data[0].embedding) == 8


def test_replies_have_the_official_types(http: httpx.Client) -> None:
    checked(CreateEmbeddingResponse, _post(http, "/v1/embeddings", input=["a", "b"]))
    vector = _post(http, "/v1/embeddings", input="a", encoding_format="base64")["data"][0]["embedding"]
    assert isinstance(vector, str)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "prompt 1"),
        ({"input": ["a"] * 2049}, "at most 2048"),
        ({"input": [600]}, "from 0 to 511"),
        ({"input": "word " * 300}, "truncate_prompt_tokens"),
        ({"input": "a", "dimensions": 33}, "may be cut to 1 to 32"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "prompt_name": "other"}, "'query', 'document'"),
        ({"input": "a", "truncate_prompt_tokens": 97}, "max_model_len=96"),
        ({"input": "a", "temperature": 1}, "temperature"),
    ],
)
def test_what_cannot_be_served_is_named(http: httpx.Client, body: dict[str, Any], says: str) -> None:
    error = _post(http, "/v1/embeddings", 400, **body)["error"]
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"


def test_long_texts_are_cut_on_demand(http: httpx.Client) -> None:
    usage = _post(http, "/v1/embeddings", input=["word " * 300, "a"], truncate_prompt_tokens=-1)["usage"]
    assert usage["prompt_tokens"] == 96 + 3


def test_rerank(http: httpx.Client, embedder: Server) -> None:
    documents: list[Any] = ["no", {"text": "a cat is an animal"}, "tensor"]
    texts = ["no", "a cat is an animal", "tensor"]
    vectors = {
        (role, text): np.array(_post(http, "/v1/embeddings", input=text, prompt_name=role)["data"][0]["embedding"])
        for role, text in [("query", "what is a cat?"), *(("document", text) for text in texts)]
    }
    query = vectors["query", "what is a cat?"]
    expected = {text: float(query @ vectors["document", text]) for text in texts}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = _post(http, path, query="what is a cat?", documents=documents, model=MODEL)
        results = answer["results"]
        assert [result["document"]["text"] for result in results] == sorted(texts, key=lambda text: -expected[text])
        for result in results:
            text = texts[result["index"]]
            assert result["document"] == {"text": text}
            assert result["relevance_score"] == pytest.approx(expected[text], abs=1e-5)
        assert (answer["model"], answer["id"][:7]) == (MODEL, "rerank-")
    best = _post(http, "/rerank", query="what is a cat?", documents=documents, top_n=1, return_documents=False)
    assert best["results"] == [{**results[0], "document": None}]


def test_score(http: httpx.Client) -> None:
    ranked = _post(http, "/rerank", query="a", documents=["b", "cat"])["results"]
    expected = [result["relevance_score"] for result in sorted(ranked, key=lambda result: result["index"])]
    for path in ("/score", "/v1/score"):
        answer = _post(http, path, text_1="a", text_2=["b", "cat"])
        assert [item["score"] for item in answer["data"]] == pytest.approx(expected, abs=1e-6)
    assert len(_post(http, "/score", text_1=["a", "b"], text_2=["b", "cat"])["data"]) == 2
    unlike = _post(http, "/score", 400, text_1=["a", "b"], text_2=["a", "b", "c"])["error"]
    assert "2 queries for 3" in unlike["message"]
    refused = _post(http, "/rerank", 400, query="a", documents=["b"], max_chunks_per_doc=3)["error"]
    assert (refused["param"], refused["code"]) == ("max_chunks_per_doc", "unsupported_parameter")


def test_what_it_does_not_do_is_a_named_error(official: OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.BadRequestError, match="makes embeddings") as caught:
        official.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
    assert caught.value.code == "wrong_task"
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}),
    ):
        assert "makes embeddings" in _post(http, path, 400, **body)["error"]["message"]


def test_keys_models_and_metrics(http: httpx.Client, embedder: Server) -> None:
    for path in ("/v1/embeddings", "/rerank", "/v1/score"):
        assert httpx.post(embedder.url + path, json={}).status_code == 401
    assert _post(http, "/v1/embeddings", 404, input="a", model="other")["error"]["code"] == "model_not_found"
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["implementation"], model["max_model_len"]) == (MODEL, "fused", 96)
    before = _metric(http, "transfuse:prompt_tokens_total")
    _post(http, "/v1/embeddings", input=["a", "a"])
    assert _metric(http, "transfuse:prompt_tokens_total") == before + 6
    assert _metric(http, 'transfuse:request_success_total{finished_reason="stop"}') >= 2


def _metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def test_many_texts_are_one_request_and_nobody_waits_for_them(http: httpx.Client, embedder: Server) -> None:
    """More texts than there are places; meanwhile the loop answers others."""
    gaps, done = [], threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=embedder.url, timeout=30) as other:
            while not done.is_set():
                before = time.monotonic()
                assert other.get("/live").status_code == 200
                gaps.append(time.monotonic() - before)
                time.sleep(0.01)

    prober = threading.Thread(target=probe)
    prober.start()
    try:
        texts = [f"text number {index}" * (1 + index % 5) for index in range(2048)]
        answer = _post(http, "/v1/embeddings", input=texts)
    finally:
        done.set()
        prober.join()
    assert [item["index"] for item in answer["data"]] == list(range(2048))
    np.testing.assert_allclose(
        answer["data"][1234]["embedding"],
        _post(http, "/v1/embeddings", input=texts[1234])["data"][0]["embedding"],
        atol=1e-5,
    )
    assert len(gaps) > 5
    assert sorted(gaps)[len(gaps) * 9 // 10] < 1.0


def test_texts_of_clients_that_leave_are_given_up(http: httpx.Client, embedder: Server) -> None:
    steps = embedder.llm.stats.num_step_tokens
    texts = [f"text number {index} " * 5 for index in range(2048)]
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/embeddings", json={"input": texts}, timeout=0.3)
    embedder.wait_idle(2.0)
    time.sleep(0.3)
    assert embedder.llm.stats.num_step_tokens - steps < 2048 * 30


def test_generated_requests_never_break_it(embedder: Server) -> None:
    schema = schemathesis.openapi.from_url(f"{embedder.url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
    statuses: Counter[int] = Counter()
    operations = [result.ok() for result in schema.get_all_operations()]
    ours = [one for one in operations if one.path in ("/v1/embeddings", "/rerank", "/v2/rerank", "/score")]
    assert len(ours) == 4
    for operation in ours:
        for mode in GenerationMode:

            @settings(
                max_examples=15,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
                database=None,
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: schemathesis.Case) -> None:
                if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                    case.body["model"] = MODEL
                response = case.call(base_url=embedder.url, timeout=60, headers={"Authorization": f"Bearer {KEY}"})
                statuses[response.status_code] += 1
                assert response.status_code < 500, (case.as_curl_command(), response.text[:500])

            send()
    assert statuses[200] > 0
    assert statuses[400] > 0


def test_async_llm(folder: Path, settings: dict[str, Any]) -> None:
    asyncio.run(_try_async_llm(folder, settings))


async def _try_async_llm(folder: Path, settings: dict[str, Any]) -> None:
    llm = AsyncLLM(folder, max_num_seqs=4, **settings)
    async with llm:
        assert llm.task == "embed"
        (one,) = await llm.embed("a cat")
        many = await llm.embed(["a cat"] * 30, at_once=3)
        assert all(output.outputs == one.outputs for output in many)
        near, far = await llm.score("a cat", ["a cat", "no"])
        assert near.outputs.score > far.outputs.score
        with pytest.raises(CapacityError):
            await llm.embed(["a", "word " * 300])
        with pytest.raises(WrongTaskError):
            async for _ in llm.generate("a"):
                pass
        with pytest.raises(WrongTaskError):
            async for _ in llm.chat([{"role": "user", "content": "a"}]):
                pass
        task = asyncio.create_task(llm.embed(["word " * 15] * 500))
        while not (llm.num_unfinished or task.done()):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert llm.num_unfinished == 0
        lost = asyncio.create_task(llm.embed(["word " * 15] * 500))
        while not (llm.num_unfinished or lost.done()):
            await asyncio.sleep(0)
    with pytest.raises(EngineClosedError):
        await lost
