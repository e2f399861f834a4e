"""Replays what clients send to a server, and says what their users will miss."""

from __future__ import annotations
