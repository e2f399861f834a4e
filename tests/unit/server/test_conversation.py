"""Conversations put together out of the pieces that APIs cut them into."""

from __future__ import annotations

import time

from transfuse.server.conversation import Turns


def test_what_one_side_says_in_a_row_is_one_message() -> None:
    turns = Turns()
    turns.add_system("")
    turns.add_system("a")
    turns.add_system("b")
    turns.add_user("c")
    turns.add_user("")
    turns.add_system("d")
    turns.add_call("1", "look", {})
    turns.add_reasoning("e")
    turns.add_reasoning("f")
    turns.add_assistant("")
    turns.add_assistant("g")
    turns.add_result("1", "h")
    assert turns.messages == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c\n\n<system-reminder>\nd\n</system-reminder>"},
        {
            "role": "assistant",
            "content": "g",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}],
            "reasoning_content": "e\nf",
        },
        {"role": "tool", "tool_call_id": "1", "name": "look", "content": "h"},
    ]


def test_the_largest_body_in_very_many_pieces_takes_no_time() -> None:
    turns, piece = Turns(), "x" * 100
    start = time.perf_counter()
    for _ in range(100_000):
        turns.add_user(piece)
    (message,) = turns.messages
    assert len(message["content"]) == 101 * 100_000 - 1
    assert time.perf_counter() - start < 2  # copied with each piece, half a terabyte would take minutes
