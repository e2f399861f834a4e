"""The page at `/` in headless Chromium: a tiny Llama behind a key, used with pointer and keyboard.

`--screenshots FOLDER` also talks to SmolLM2 and keeps pictures of it, for the documentation.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from tests.e2e.server_thread import KEY, MODEL, Server, with_template
from transfuse.async_llm import AsyncLLM
from transfuse.outputs import RequestOutput
from transfuse.server.settings import ServerSettings

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ARGUMENTS += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
SCREEN, PHONE = {"width": 1200, "height": 800}, {"width": 360, "height": 640}
MILLISECONDS = 20_000


class HeldLLM(AsyncLLM):
    """Hands out only the beginning of an answer until it may go on.

    Attributes:
        held: cleared, answers go on.
        num_left: generations whose reader left before their end.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.held = threading.Event()
        self.num_left = 0

    async def generate(self, *args: Any, **more: Any) -> AsyncGenerator[RequestOutput, None]:
        ended = False
        answers = super().generate(*args, **more)
        try:
            async for answer in answers:
                yield answer
                while self.held.is_set():
                    await asyncio.sleep(0.01)
            ended = True
        finally:
            self.num_left += not ended
            await answers.aclose()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def server(
    browser: Browser,
    zoo_folder: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    settings: dict[str, Any],
) -> Iterator[Server]:
    folder = with_template(zoo_folder("llama"), tmp_path_factory.mktemp("page") / "llama")
    served = ServerSettings(served_model_names=(MODEL,), api_keys=(KEY,), max_num_seqs=4, port=0)
    with Server(HeldLLM(folder, kv_cache_memory_bytes=2**25, max_num_seqs=4, **settings), served) as running:
        yield running


@pytest.fixture
def context(browser: Browser, server: Server) -> Iterator[BrowserContext]:
    with browser.new_context(base_url=server.url, viewport=SCREEN) as made:  # type: ignore[arg-type]
        made.set_default_timeout(MILLISECONDS)
        yield made


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """The page with a key, and a model that is ready; nothing may go wrong in it unseen, nor be fetched elsewhere."""
    expect.set_options(timeout=MILLISECONDS)
    context.add_init_script(f"sessionStorage.setItem('transfuse-api-key', {KEY!r})")
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text) if "Policy" in message.text else None)
    opened.on("request", lambda request: problems.append(request.url) if not is_own(request.url) else None)

    def is_own(url: str) -> bool:
        return url.startswith(opened.url.partition("/#")[0].removesuffix("/")) or opened.url == "about:blank"

    opened.goto("/")
    expect(opened.locator("header .pill")).to_have_text("ready")
    yield opened
    assert not problems


def say(page: Page, text: str, **numbers: str) -> None:
    for label, number in numbers.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(number)
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def answer_of(page: Page, state: str) -> Any:
    found = page.locator(f".answer[data-state={state}]").last
    expect(found).to_be_visible()
    return found


def serve_stream(page: Page, *events: dict[str, Any] | str, **head: Any) -> None:
    """Lets the server answer a conversation with these events."""
    body = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
    head = {"status": 200, "content_type": "text/event-stream", "body": body} | head

    def fulfill(route: Route) -> None:
        route.fulfill(**head)

    page.route("**/v1/chat/completions", fulfill)


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def test_a_key_is_asked_for_kept_for_the_tab_and_forgotten(context: BrowserContext) -> None:
    page = context.new_page()
    page.goto("/")
    page.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("knows no such key")
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Use the key").click()
    expect(page.locator("header .server")).to_contain_text("tiny-llama")
    page.reload()
    expect(page.locator("header .pill")).to_have_text("ready")
    assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
    page.get_by_role("button", name="Forget key").click()
    expect(page.get_by_label("API key")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_an_answer_streams_and_what_was_said_before_goes_along(page: Page) -> None:
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.get_by_label("System prompt").fill("Be brief.")
    say(page, "Hello", Most_tokens="8", Temperature="0", Seed="3")
    first = answer_of(page, "done")
    expect(first.locator(".facts")).to_contain_text("8 tokens")
    text = first.locator(".text").text_content()
    say(page, "Again")
    expect(page.locator(".answer[data-state=done]")).to_have_count(2)
    assert bodies[0]["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert bodies[1]["messages"][2:] == [{"role": "assistant", "content": text}, {"role": "user", "content": "Again"}]
    assert {name: bodies[1][name] for name in ("max_tokens", "temperature", "seed")} == {
        "max_tokens": 8,
        "temperature": 0,
        "seed": 3,
    }
    assert not bodies[1].keys() & {"top_p", "stop", "logprobs"}
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)


@pytest.mark.parametrize("by", ["button", "Escape"])
def test_an_answer_is_shown_while_it_grows_and_can_be_stopped(page: Page, server: Server, by: str) -> None:
    llm = server.llm
    assert isinstance(llm, HeldLLM)
    before = llm.num_left
    llm.held.set()
    try:
        say(page, "Hello", Most_tokens="64", Temperature="0")
        expect(answer_of(page, "streaming").locator(".text")).not_to_be_empty()
        if by == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        stopped = answer_of(page, "stopped")
        expect(stopped.locator(".text").first).not_to_be_empty()
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        # Held until the server knows that the page left: an answer that went on before could be at its end by then.
        for _ in range(200):
            if llm.num_left > before:
                break
            page.wait_for_timeout(50)
    finally:
        llm.held.clear()
    for _ in range(200):
        if llm.num_unfinished == 0:
            break
        page.wait_for_timeout(50)
    assert (llm.num_left, llm.num_unfinished) == (before + 1, 0)


def test_an_answer_says_how_it_was_served(page: Page) -> None:
    say(page, "Hello", Most_tokens="3", Temperature="0")
    why = answer_of(page, "done").locator(".why")
    expect(why.locator("tbody tr").first).not_to_be_visible()
    why.locator("summary").focus()
    page.keyboard.press("Enter")
    rows = dict(re.findall(r"(Temperature|Most tokens|Top p|Seed)\t(.*)", why.locator("tbody").inner_text()))
    assert rows == {
        "Temperature": "0\tthe request",
        "Most tokens": "3\tthe request",
        "Top p": "1\tthe API's default",
        "Seed": "none\tthe API's default",
    }
    expect(why).to_contain_text(
        re.compile(r"fused in float32: .*Laid out in \d+\.\d+ s, waited \d+\.\d+ s, read the prompt for")
    )


def test_tokens_show_what_else_might_have_come(page: Page) -> None:
    page.get_by_label("Show tokens with their probabilities").check()
    page.get_by_label("Likeliest tokens to show for each").fill("3")
    say(page, "Hello", Most_tokens="6", Temperature="0")
    answer = answer_of(page, "done")
    tokens = answer.locator(".token")
    expect(tokens).to_have_count(6)
    tokens.nth(4).hover()
    expect(answer.locator(".candidates tbody tr")).to_have_count(3)
    caption = answer.locator(".candidates caption")
    pointed = caption.text_content()
    tokens.nth(4).focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(5)).to_be_focused()
    expect(caption).not_to_have_text(pointed or "")
    assert re.search(r"\d %, log-probability -\d", caption.text_content() or "")
    expect(answer.locator(".token[tabindex='0']")).to_have_count(1)


def test_reasoning_is_shown_apart_and_markup_is_text(page: Page) -> None:
    markup = "<img src=x onerror=\"document.title='broken'\"><b>bold</b>"
    serve_stream(
        page, delta(role="assistant", content=""), delta(reasoning="Let me think."), delta(content=markup), "[DONE]"
    )
    say(page, markup)
    answer = answer_of(page, "done")
    expect(answer.locator("summary")).to_have_text("Reasoning")
    assert answer.locator(".reasoning .text").text_content() == "Let me think."
    expect(answer.locator("> .text")).to_have_text(markup)
    expect(page.locator(".said .text")).to_have_text(markup)
    expect(page.locator(".turn img, .turn b")).to_have_count(0)
    expect(page).to_have_title("Transfuse")


def test_errors_are_told_in_words(page: Page) -> None:
    say(page, "Hello", Top_p="1.5")
    expect(answer_of(page, "failed").get_by_role("alert")).to_contain_text("top_p")
    page.get_by_label("Top p").fill("")
    serve_stream(page, delta(content="So "), {"error": {"message": "The core died."}})
    say(page, "Hello", Most_tokens="5")
    failed = answer_of(page, "failed")
    expect(failed.get_by_role("alert")).to_have_text("The core died.")
    expect(failed.locator("> .text").first).to_have_text("So ")
    page.unroute("**/v1/chat/completions")
    serve_stream(page, delta(content="cut"))
    say(page, "Hello")
    expect(page.get_by_role("alert").last).to_contain_text("broke off")
    page.unroute("**/v1/chat/completions")
    serve_stream(page, status=502, content_type="text/html", body="<h1>Bad gateway</h1>")
    say(page, "Hello")
    expect(page.get_by_role("alert").last).to_have_text("The server answered with status 502.")


def test_charts_get_points_from_what_is_served(page: Page) -> None:
    say(page, "Hello", Most_tokens="200", Temperature="0")
    answer_of(page, "done")
    page.get_by_role("link", name="Charts").click()
    charts = page.locator("figure.chart")
    expect(charts).to_have_count(6)
    expect(charts.first.locator("svg")).to_have_attribute("data-points", re.compile(r"^([2-9]|\d\d+)$"))
    latency = page.get_by_role("figure", name="Time to first token")
    expect(latency).to_have_accessible_name(re.compile(r"median [\d.]+ m?s, 99th percentile [\d.]+ m?s"))
    for chart in ("Throughput", "Batch mix"):
        figure = page.locator("figure.chart", has=page.get_by_role("heading", name=chart))
        expect(figure.locator("path.line").first).to_have_attribute("d", re.compile("M"))
    charts.first.focus()
    page.keyboard.press("ArrowLeft")
    expect(charts.first.locator(".cursor")).to_have_count(1)
    expect(charts.first.locator("figcaption")).to_contain_text("s ago")


def test_the_fusion_map_shows_each_layer(page: Page, server: Server) -> None:
    page.get_by_role("link", name="Fusion map").click()
    expect(page.get_by_label("Fusion map").first).to_contain_text("LlamaForCausalLM")
    plan = server.llm.fusion_plan
    assert plan is not None
    expect(page.locator(".fusion")).to_contain_text(f"{plan.num_fused_linears} of {plan.num_linears} linear layers")
    rows = page.locator(".map tbody tr")
    expect(rows).to_have_count(2)
    cells = rows.first.locator("td")
    cells.first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    expect(rows.nth(1).locator("td").nth(1)).to_be_focused()
    expect(page.locator(".told h2")).to_contain_text("model.layers.1, ")
    expect(page.locator(".kind").first).to_be_visible()


def test_the_keyboard_reaches_everything(page: Page) -> None:
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    answer_of(page, "done")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.evaluate("document.activeElement.blur()")
    reached: set[str] = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert reached >= {"Chat", "Charts", "Fusion map", "system", "temperature", "stop", "message", "New chat"}
    page.get_by_role("link", name="Charts").focus()
    page.keyboard.press("Enter")
    expect(page.locator("figure.chart").first).to_be_visible()


def test_every_control_has_a_name(page: Page) -> None:
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("input, textarea, button, a, figure")]
            .filter((each) => !(each.labels?.length || each.ariaLabel || each.textContent.trim()))
            .map((each) => each.outerHTML)"""
    )
    assert not unnamed


def test_it_follows_the_dark_scheme_with_enough_contrast(page: Page) -> None:
    for scheme, is_dark in (("light", False), ("dark", True)):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        ground, ink, card, muted = (luminance(page, name) for name in ("--ground", "--ink", "--card", "--muted"))
        assert (ground < 0.1) is is_dark and (card < 0.1) is is_dark
        for text in (ink, muted, luminance(page, "--accent"), luminance(page, "--bad"), luminance(page, "--warm")):
            assert (max(text, card) + 0.05) / (min(text, card) + 0.05) >= 4.5


def luminance(page: Page, name: str) -> float:
    """Of a colour of the page, as WCAG has it."""
    hexes = page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('{name}')").strip().lstrip("#")
    hexes = "".join(digit * 2 for digit in hexes) if len(hexes) == 3 else hexes
    parts = [int(hexes[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_on_a_phone_nothing_is_wider_than_the_screen(page: Page) -> None:
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    page.reload()
    expect(page.locator("header .pill")).to_have_text("ready")
    serve_stream(page, delta(content="x" * 400), "[DONE]")
    say(page, "y" * 400)
    answer_of(page, "done")
    expect(page.get_by_role("button", name="Send")).to_be_in_viewport()
    for view in ("Chat", "Charts", "Fusion map"):
        page.get_by_role("link", name=view).click()
        expect(page.locator(".fusion h2, figure.chart, .chat:not([hidden])").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert page.evaluate("document.querySelector('main').scrollWidth <= document.querySelector('main').clientWidth")


def test_screenshots(browser: Browser, pytestconfig: pytest.Config) -> None:
    folder = pytestconfig.getoption("--screenshots")
    if folder is None:
        pytest.skip("pictures for the documentation; --screenshots FOLDER takes them")
    served = ServerSettings(served_model_names=("SmolLM2-135M-Instruct",), max_num_seqs=8, port=0)
    llm = AsyncLLM(None, kv_cache_memory_bytes=2**28, max_num_seqs=8, show_progress=False)
    with Server(llm, served) as running, browser.new_context(base_url=running.url, viewport=SCREEN) as context:  # type: ignore[arg-type]
        context.set_default_timeout(60_000)
        page = context.new_page()
        page.goto("/")
        expect(page.locator("header .pill")).to_have_text("ready")
        page.get_by_label("Show tokens with their probabilities").check()
        say(page, "Name three rivers of Europe.", Most_tokens="60", Temperature="0.7", Seed="7")
        page.wait_for_selector(".answer[data-state=done]")
        page.locator(".token").nth(3).hover()
        picture(page, folder, "page-chat")
        page.get_by_label("Show tokens with their probabilities").uncheck()
        for text in ("What is a waterfall?", "And a delta?"):
            say(page, text, Most_tokens="120")
            page.wait_for_selector(".answer[data-state=streaming]", state="detached")
        page.get_by_role("link", name="Charts").click()
        page.emulate_media(color_scheme="dark")
        picture(page, folder, "page-charts")
        page.get_by_role("link", name="Fusion map").click()
        page.emulate_media(color_scheme="light")
        page.wait_for_selector(".map")
        picture(page, folder, "page-fusion")
        page.set_viewport_size(PHONE)  # type: ignore[arg-type]
        page.emulate_media(color_scheme="dark")
        page.get_by_role("link", name="Chat").click()
        page.get_by_text("Settings", exact=True).click()
        page.locator(".log").evaluate("log => log.scrollTo(0, log.scrollHeight)")
        picture(page, folder, "page-phone")


def picture(page: Page, folder: str, name: str) -> None:
    page.wait_for_timeout(300)
    page.screenshot(path=Path(folder) / f"{name}.png")
