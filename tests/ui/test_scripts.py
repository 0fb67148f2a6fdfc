"""The scripts of the web pages, checked without a browser."""

from __future__ import annotations

import re
from pathlib import Path

from drawbar import ui

SCRIPTS = (Path(ui.__file__).parent / "_static").glob("*.js")
BROWSER = {"fetch", "matchMedia", "requestAnimationFrame", "scrollTo"}
BROWSER |= {"addEventListener", "removeEventListener", "dispatchEvent", "getComputedStyle"}
BROWSER |= {"setTimeout", "clearTimeout", "setInterval", "clearInterval"}
BROWSER |= {"encodeURIComponent", "decodeURIComponent"}
LANGUAGE = {"catch", "constructor", "for", "if", "return", "super", "switch", "while"}
CSS = {"blur", "rotate", "url", "var"}


def test_scripts_call_only_functions_that_exist() -> None:
    """A function that is called but never defined, passed, or imported has been renamed."""
    text = "\n".join(script.read_text() for script in SCRIPTS)
    called = set(re.findall(r"(?<![\w.$\\])([a-z]\w+)\(", text))
    known = set(re.findall(r"function\*? (\w+)|\b([a-z]\w+)\b(?!\()", text))
    names = {name for pair in known for name in pair}
    assert called - names - BROWSER - LANGUAGE - CSS == set()
