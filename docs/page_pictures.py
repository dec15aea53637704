"""Takes the screenshots of docs/report.md: docs/pictures/page*.png.

    python docs/page_pictures.py [--chromium PATH] [--page FILE]

Needs Chromium, and Pillow, which matplotlib brings. Without a Chromium nothing is done. The page is
made of DeepSeek-V3 with its 61 layers (minutes), or is FILE, one that `inspect --html` wrote.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PICTURES = Path(__file__).parent / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MODEL = "deepseek-v3"
#: Colours of a picture: text stays sharp, and a file has some 50 KB.
COLOURS = 48


class Picture(NamedTuple):
    """A screenshot: its file, the sections that it shows (all, where none is named), the window,
    the colour scheme."""

    name: str
    sections: tuple[str, ...]
    width: int
    height: int
    dark: bool = False


WANTED = (
    Picture("page.png", (), 1280, 1180),
    Picture("page-graph.png", ("graph",), 1280, 1500),
    Picture("page-dark.png", ("step", "fused"), 1920, 1400, dark=True),
    Picture("page-roofline.png", ("roofline",), 1280, 730),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chromium", help=f"its path; default: one of {', '.join(BROWSERS)}")
    parser.add_argument("--page", type=Path, help="a page that was written before")
    options = parser.parse_args(arguments)
    names = [options.chromium] if options.chromium else BROWSERS
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        print(f"skipped: there is no {' or '.join(names)}; --chromium PATH names one",
              file=sys.stderr)  # fmt: skip
        return 0
    with tempfile.TemporaryDirectory() as folder:
        page = options.page or _written(Path(folder) / "page.html")
        for picture in WANTED:
            _take(chromium, page, picture, Path(folder))
            print(PICTURES / picture.name)
    return 0


def _written(path: Path) -> Path:
    from tilewright.compiler import lower
    from tilewright.tools.kernel_audit import audit_kernels
    from tilewright.tools.report.html_report import write_html
    from tilewright.tools.zoo import load_model

    lowered = lower(*load_model(MODEL), target="sm100")
    write_html(path, MODEL, lowered, audit_kernels(lowered.kernels, "sm100"))
    return path


def _take(chromium: str, page: Path, picture: Picture, folder: Path) -> None:
    """Raises CalledProcessError or TimeoutExpired where the browser fails."""
    from PIL import Image

    shot, shown = folder / picture.name, folder / "shown.html"
    shown.write_text(_only(page.read_text("utf-8"), picture.sections), "utf-8")
    command = [
        *(chromium, "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
        *("--disable-background-networking", "--disable-sync", "--disable-component-update"),
        *(f"--user-data-dir={folder / 'profile'}", f"--screenshot={shot}"),
        f"--window-size={picture.width},{picture.height}",
        f"--blink-settings=preferredColorScheme={0 if picture.dark else 1}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        shown.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    image = Image.open(shot).convert("RGB")
    # The other methods mix a bar's colour with those of the edges of letters.
    few = image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(PICTURES / picture.name, optimize=True)


def _only(page: str, sections: Sequence[str]) -> str:
    """The page with no other sections: a headless browser takes pictures of its top alone."""
    if not sections:
        return page
    kept = "".join(f":not([aria-labelledby={name}])" for name in sections)
    hidden = f"<style>header, nav, .numbers, section{kept} {{ display: none }}</style>"
    return page.replace("</head>", f"{hidden}</head>", 1)


if __name__ == "__main__":
    raise SystemExit(main())
