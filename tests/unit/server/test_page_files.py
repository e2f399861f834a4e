from __future__ import annotations

import asyncio
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.unit.server.asgi import IdleLLM, Reply, call
from transfuse.server.app import create_app
from transfuse.server.page_files import load_page
from transfuse.server.settings import ServerSettings

PAGE = load_page()
TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8"}
TYPES |= {"css": "text/css; charset=utf-8", "svg": "image/svg+xml"}


def ask(path: str, method: str = "GET", state: str = "ready") -> Reply:
    settings = ServerSettings(served_model_names=("m",), api_keys=("the-key",))
    return asyncio.run(call(create_app(IdleLLM(state), settings), method, path))  # type: ignore[arg-type]


class Links(HTMLParser):
    """What a document fetches, and what of it is written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: set[str] = set()
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.fetched |= {value for name, value in attrs if name in {"src", "href"} and value}
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        self.inline += [tag] if tag == "style" or (tag == "script" and "src" not in given) else []


def test_the_page_is_there_without_a_key_and_in_every_state() -> None:
    for state in ("ready", "loading", "failed"):
        reply = ask("/", state=state)
        assert reply.status == 200
        assert reply.header("content-type") == TYPES["html"]
        assert reply.header("cache-control") == "no-cache"
        assert b'<div id="page">' in reply.body


def test_the_page_fetches_its_own_files_alone_and_holds_nothing_inline() -> None:
    links = Links()
    links.feed(ask("/").body.decode())
    assert links.fetched == PAGE.keys() - {"/"} and not links.inline
    assert {path.rpartition(".")[2] for path in links.fetched} == {"js", "css", "svg"}


@pytest.mark.parametrize("path", PAGE)
def test_every_file_has_its_type_and_the_policy(path: str) -> None:
    reply = ask(path)
    assert reply.status == 200 and reply.body == PAGE[path].content
    if path != "/":
        assert re.fullmatch(r"/assets/[a-z]+-[\w-]{8}\.[a-z]+", path)
        assert reply.header("content-type") == TYPES[path.rpartition(".")[2]]
        assert "immutable" in (reply.header("cache-control") or "")
    assert reply.header("x-content-type-options") == "nosniff"
    rules = dict(rule.split(" ", 1) for rule in (reply.header("content-security-policy") or "").split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}


def test_head_sends_no_body_and_others_are_refused() -> None:
    assert ask("/", "HEAD").status == 200
    assert ask("/", "POST").status in {401, 405, 415}
    assert ask("/", "DELETE").status == 405


@pytest.mark.parametrize("path", ["/assets/none-00000000.js", "/assets/../auth.py", "/%2e", "//", "/index.html"])
def test_no_other_spelling_and_no_other_file_is_open(path: str) -> None:
    assert ask(path).status == 401


def test_files_of_no_known_type_are_left_out(tmp_path: Path) -> None:
    for name in ("index.html", "build.json", "a.py", "assets/b-1.js"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert load_page(tmp_path).keys() == {"/", "/assets/b-1.js"}
