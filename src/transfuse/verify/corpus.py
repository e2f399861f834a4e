"""The texts that a model is verified on, and prompts from a file."""

from __future__ import annotations

from pathlib import Path

from transfuse.errors import ConfigError

# Unlike in language, alphabet, layout and length; the first four serve `--quick`.
TEXTS = (
    "The old lighthouse keeper climbed the stairs one last time. Below him the sea was quiet, and for the first time "
    "in thirty years there was no ship to wait for. He thought of the letters that he had never",
    "def merge(left, right):\n    result = []\n    while left and right:\n        if left[0] <= right[0]:\n"
    "            result.append(left.pop(0))\n        else:\n",
    "Die Stadt lag noch im Nebel, als die ersten Züge aus dem Bahnhof rollten. Auf dem Markt stellten Händler ihre "
    "Tische auf, und es roch nach Brot und",
    '{"name": "sensor-7", "unit": "°C", "values": [21.5, 21.7, 22.0, 22.4], "ok": true}\n{"name": "sensor-8", "unit":',
    "Question: A train leaves at 9:40 and arrives at 13:05. How long does the journey take?\nAnswer: From 9:40 to "
    "13:00 it is",
    "one two three one two three one two three one two three one two",
    "早上的市场很热闹。卖水果的人一边唱歌一边把苹果摆好,",
    "# Notes on soil\n\n| layer | depth (cm) | colour |\n|---|---|---|\n| humus | 0-10 | dark brown |\n| clay | 30-",
)
NUM_QUICK = 4


def corpus(prompts: Path | None, *, quick: bool) -> list[str]:
    """The built-in texts, or the lines of a file; a few of them where it has to be quick.

    Raises:
        ConfigError: the file cannot be read or holds no prompt.
    """
    texts = list(TEXTS) if prompts is None else read_prompts(prompts)
    return texts[:NUM_QUICK] if quick else texts


def read_prompts(path: Path) -> list[str]:
    """The lines of a file that are not blank.

    Raises:
        ConfigError: the file cannot be read or holds none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The prompts in {path} cannot be read: {error}. Give a text file, one prompt a line."
        ) from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} holds no prompt; write one a line.")
    return prompts
