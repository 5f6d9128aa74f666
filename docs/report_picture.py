"""Draw docs/report.png and docs/report_dark.png: the top of one report in light and in dark
colours, as headless Chromium shows it.

`python docs/pictures.py report` runs this.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "efficientnet_lite.py"
CONFIG = ROOT / "configs" / "cpu_int8.json"
FILES = {"light": "report.png", "dark": "report_dark.png"}
"""The names of the pictures by colour scheme."""
WIDTH = 1180
MAX_HEIGHT = 4000
MARGIN = 16
"""Pixels below the last line of text."""
COLOURS = 256
CUT = """<style>
#layers tbody tr:nth-child(n + 5), #layers details, #depth ~ section { display: none; }
</style></head>"""
"""Only the first sections and the four worst layers are in the picture."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_SCHEMES = {"light": 1, "dark": 0}
"""Chromium's numbers of the colour schemes."""


def draw_report(target: Path) -> None:
    """Write both pictures into a folder.

    They have the same size, so that one replaces the other on a page.
    """
    browser = _browser()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = _report(folder)
        page = folder / "page.html"
        page.write_text(report.replace("</head>", CUT, 1), "utf-8")
        images = {}
        for scheme in FILES:
            images[scheme] = _screenshot(browser, page, scheme)
    height = max(_content_height(image) for image in images.values()) + MARGIN
    for scheme, image in images.items():
        picture = image.crop((0, 0, WIDTH, height)).quantize(COLOURS, dither=Image.Dither.NONE)
        picture.save(target / FILES[scheme], optimize=True)


def _report(folder: Path) -> str:
    """Return the report of EfficientNet-Lite0 in int8, after calibration and test."""
    shutil.copy(MODEL, folder)
    config = CONFIG.read_text("utf-8").replace("../schemas", str(ROOT / "schemas"))
    (folder / CONFIG.name).write_text(config, "utf-8")
    quantizer = [sys.executable, "-m", "quantizer", "--model", MODEL.name, "-q"]
    calib = [*quantizer, "--quant_mode", "calib", "--config_file", CONFIG.name]
    test = [*quantizer, "--quant_mode", "test"]
    # The report shows paths as they were given, so the commands run where the files are
    for command in (calib, test):
        subprocess.run(command, cwd=folder, check=True)
    return (folder / "quantize_result" / "report.html").read_text("utf-8")


def _browser() -> str:
    """Return the path of Chromium."""
    for name in BROWSERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise SystemExit(f"docs/report.png needs a browser: install one of {', '.join(BROWSERS)}")


def _screenshot(browser: str, page: Path, scheme: str) -> Image.Image:
    """Return a page in one colour scheme."""
    file = page.with_name(f"{scheme}.png")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        f"--user-data-dir={page.with_name('profile')}",
        f"--window-size={WIDTH},{MAX_HEIGHT}",
        f"--blink-settings=preferredColorScheme={_SCHEMES[scheme]}",
        f"--screenshot={file}",
        page.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return Image.open(io.BytesIO(file.read_bytes())).convert("RGB")


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
