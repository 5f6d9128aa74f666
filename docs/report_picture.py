"""Draw docs/report.png and docs/report_dark.png: the top of one report in light and in dark
colours, as a browser shows it.

`python docs/pictures.py report` runs this. `pip install PyQt6-WebEngine` brings the browser.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
FILES = {"light": "report.png", "dark": "report_dark.png"}
"""The names of the pictures by colour scheme."""
WIDTH = 1180
MAX_HEIGHT = 4000
MARGIN = 16
"""Pixels below the last line of text."""
COLOURS = 256
WAIT_MS = 1500
"""The time in which a page runs its script and is painted."""
CUT = """<style>
::-webkit-scrollbar { display: none; }
nav, .readout, #outputs, #exports > :not(h2, h3, dl), #layers > :not(h2, .scroll),
#layers :is(th, td):last-child, #layers tbody tr:nth-child(n + 5), #depth ~ section {
  display: none;
}
</style></head>"""
"""Only figures, the four worst layers and one drawing are in the picture."""
IS_DARK = "(prefers-color-scheme: dark)"
HOLDS = {"light": "(max-width: 0)", "dark": "(min-width: 0)"}
"""Stand for IS_DARK, by colour scheme."""


def draw_report(target: Path) -> None:
    """Write both pictures into a folder.

    They have the same size, so that one replaces the other on a page.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = _report(folder).replace("</head>", CUT, 1)
        pages = []
        for scheme, holds in HOLDS.items():
            page = folder / f"{scheme}.html"
            page.write_text(report.replace(IS_DARK, holds), "utf-8")
            pages.append(page)
        _take_screenshots(pages)
        images = {}
        for scheme in FILES:
            images[scheme] = Image.open(folder / f"{scheme}.png").convert("RGB")
    height = max(_content_height(image) for image in images.values()) + MARGIN
    for scheme, image in images.items():
        picture = image.crop((0, 0, WIDTH, height)).quantize(COLOURS, dither=Image.Dither.NONE)
        picture.save(target / FILES[scheme], optimize=True)


def _report(folder: Path) -> str:
    """Return the report of README's first run."""
    for path in (*EXAMPLES.glob("mnist*"), EXAMPLES / "resnet.py"):
        shutil.copy(path, folder)
    command = [sys.executable, "-m", "quantizer", "run", "mnist.py", "--to", "onnx", "-q"]
    command += ["--gate", "top1_drop<=0.01"]
    # The report shows paths as they were given, so the command runs where the files are
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "quantize_result" / "report.html").read_text("utf-8")


def _take_screenshots(pages: list[Path]) -> None:
    """Write a PNG beside each page."""
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--no-sandbox --disable-gpu"
    try:
        from PyQt6.QtCore import QEventLoop, QTimer, QUrl
        from PyQt6.QtWebEngineWidgets import QWebEngineView
        from PyQt6.QtWidgets import QApplication
    except ImportError as error:
        text = f"docs/report.png needs a browser: pip install PyQt6-WebEngine ({error})"
        raise SystemExit(text) from None

    application = QApplication([sys.argv[0]])
    view = QWebEngineView()
    view.resize(WIDTH, MAX_HEIGHT)
    view.show()
    for page in pages:
        painted = QEventLoop()
        view.load(QUrl.fromLocalFile(str(page)))
        QTimer.singleShot(WAIT_MS, painted.quit)
        painted.exec()
        view.grab().save(str(page.with_suffix(".png")))
    del view, application


def _content_height(image: Image.Image) -> int:
    """Return the height of an image without the empty rows at its bottom."""
    corner = (image.width - 1, image.height - 1)
    paper = Image.new("RGB", image.size, image.getpixel(corner))
    box = ImageChops.difference(image, paper).getbbox()
    if box is None or box[3] == image.height:
        raise SystemExit(
            f"the screenshot of the report is empty or taller than {MAX_HEIGHT} pixels: "
            "change CUT or MAX_HEIGHT in docs/report_picture.py"
        )
    return box[3]
