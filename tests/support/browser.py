"""Headless Chromium: a page after its script, and what axe-core finds on it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), "")
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
"""Where `npm install --no-save axe-core` puts it."""
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--window-size=1400,900",
    # Timers and promises are done before the page is printed
    "--virtual-time-budget=30000",
    "--dump-dom",
)
_FRAME = """<!doctype html><meta charset="utf-8"><style>:root {{ color-scheme: light dark; }}</style>
<iframe src="page.html" style="width: {width}px; height: 900px; border: 0"></iframe>
<script>addEventListener("message", (event) => (document.title = event.data));</script>"""
_CHECK = """<script src="axe.min.js"></script><script>
const check = async () => {
  const open = [...document.querySelectorAll("details")];
  const found = [];
  for (const isOpen of [false, true]) {
    for (const details of open) details.open = isOpen;
    const { violations } = await axe.run(document, { resultTypes: ["violations"] });
    for (const { id, nodes } of violations) found.push(id + ": " + nodes.map((node) => node.target.join(" ")).join(", "));
  }
  const texts = [...document.querySelectorAll("svg text")].map((text) => {
    const svg = text.ownerSVGElement;
    return parseFloat(getComputedStyle(text).fontSize) * (svg.getBoundingClientRect().width / svg.viewBox.baseVal.width);
  });
  parent.postMessage(JSON.stringify({
    violations: found,
    width: innerWidth,
    scrolled: document.documentElement.scrollWidth,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    smallest: Math.min(...texts),
  }), "*");
};
check();
</script>"""


def shown(page: str, folder: Path, script: str = "") -> str:
    """The page after its own script and this one, as Chromium has it then."""
    file = folder / "page.html"
    file.write_text(
        page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8"
    )
    return _dumped(file)


def checked(page: str, folder: Path, *, width: int, is_dark: bool) -> dict[str, Any]:
    """What axe-core finds on the page in a frame of this width, with all parts folded and then
    open; and the size of the smallest text of a drawing in pixels.
    """
    shutil.copy(AXE, folder / "axe.min.js")
    (folder / "page.html").write_text(page.replace("</body>", f"{_CHECK}</body>"), "utf-8")
    frame = folder / "frame.html"
    frame.write_text(_FRAME.format(width=width), encoding="utf-8")
    scheme = 0 if is_dark else 1
    printed = _dumped(frame, f"--blink-settings=preferredColorScheme={scheme}")
    title = re.search(r"<title>(.*?)</title>", printed, re.DOTALL)
    assert title is not None, "the page has sent no result"
    found: dict[str, Any] = json.loads(unescape(title[1]))
    return found


def _dumped(file: Path, *options: str) -> str:
    profile = f"--user-data-dir={file.parent / 'profile'}"
    command = [CHROMIUM, *_OPTIONS, *options, profile, file.as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return ran.stdout
