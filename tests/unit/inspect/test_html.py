from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.unit.inspect.models import Fails, Holder, Stack, llama_config, report_of
from tests.unit.inspect.test_tree import report_on
from transfuse.inspect.html.code import highlight
from transfuse.inspect.html.page import page

VOID = {"meta", "br", "img", "input", "link", "hr"}


class Reader(HTMLParser):
    """Checks that tags are closed in order, and keeps what a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def llama_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page(report_of(llama_config(), tmp_path_factory.mktemp("cache")))


def test_the_page_parses_and_says_what_matters(llama_page: str) -> None:
    reader = Reader(llama_page)
    text = " ".join("".join(reader.text).split())
    for part in (
        "LlamaForCausalLM",
        "functions",
        "methods",
        "modules",
        "residual_norm",
        "Rewritten forwards",
        "22 of 22",
    ):
        assert part in text
    assert "torch.ops.transfuse.rotary" in "".join(reader.text)


def test_nothing_is_fetched(llama_page: str) -> None:
    tags = Reader(llama_page).tags
    assert not [tag for tag, _ in tags if tag in ("link", "img", "iframe", "object", "embed", "base", "form")]
    for _, attributes in tags:
        assert not attributes.keys() & {"src", "href", "srcset", "data", "action", "background", "poster"}
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"https?://|url\(|@import", llama_page)
    assert "default-src 'none'" in llama_page


def test_it_can_be_used_with_a_keyboard_and_read_aloud(llama_page: str) -> None:
    tags = Reader(llama_page).tags
    cells = [attributes for tag, attributes in tags if tag == "td" and "aria-label" in attributes]
    assert cells
    assert all(attributes["tabindex"] == "-1" and attributes["title"] for attributes in cells)
    assert any(attributes.get("aria-live") == "polite" for _, attributes in tags)
    stacks = [attributes for _, attributes in tags if attributes.get("role") == "img"]
    assert all("LlamaMLP" in str(attributes["aria-label"]) for attributes in stacks)
    assert ("html", {"lang": "en"}) in tags


def test_light_dark_and_phone_have_their_rules(llama_page: str) -> None:
    assert "prefers-color-scheme: dark" in llama_page
    assert "max-width: 40rem" in llama_page
    assert "width=device-width" in llama_page


@pytest.mark.parametrize("module", [Holder, Fails])
def test_hostile_names_and_messages_are_text(module: type, tmp_path: Path) -> None:
    text = page(report_on(module, tmp_path))
    reader = Reader(text)
    assert [tag for tag, _ in reader.tags].count("script") == 1
    assert "img" not in [tag for tag, _ in reader.tags]
    shown = "".join(reader.text)
    assert "<img src=x onerror=alert(1)>" in shown or "<script>alert(1)</script>" in shown


def test_layers_and_their_reasons_are_on_the_map(tmp_path: Path) -> None:
    report = report_on(Stack, tmp_path)
    cells = [attributes for tag, attributes in Reader(page(report)).tags if tag == "td" and "aria-label" in attributes]
    assert {str(cell["class"]) for cell in cells} <= {"fused", "partial", "refused", "none"}
    assert any("layers.1: " in str(cell["title"]) for cell in cells)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return x", '<span class="k">return</span> x'),
        (
            "f('<b>', 12)",
            '<span class="f">f</span>(<span class="s">&#x27;&lt;b&gt;&#x27;</span>, <span class="n">12</span>)',
        ),
        ("a < b & c", "a &lt; b &amp; c"),
    ],
)
def test_code_is_escaped_and_coloured(line: str, expected: str) -> None:
    assert highlight(line) == expected
