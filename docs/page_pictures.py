"""Takes the screenshots of docs/report.md: docs/pictures/page*.png.

    python docs/page_pictures.py [--chromium PATH] [--page FILE]

The script needs Chromium, and Pillow, which is installed with matplotlib. Without Chromium, the
script does nothing. The page shows DeepSeek-V3 with its 61 layers, which takes minutes to make.
FILE is a page that `inspect --html` wrote; it is used instead of a new page.
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
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURES = Path(__file__).parent / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MODEL = "deepseek-v3"
#: The number of colours of a picture. With 48, text stays sharp and a file takes about 50 KB.
COLOURS = 48


class Picture(NamedTuple):
    """A screenshot. It has a file, the sections of the page that it shows (empty for all sections),
    the size of the window, and the colour scheme."""

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
    """Takes one screenshot. Raises CalledProcessError or TimeoutExpired if the browser fails."""
    import PIL.Image

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
    image = PIL.Image.open(shot).convert("RGB")
    few = _few_colours(image)
    few.save(PICTURES / picture.name, optimize=True)


def _few_colours(image: Image) -> Image:
    """Returns the image with its `COLOURS` most frequent colours. Every other colour becomes the
    nearest of them.

    Pillow's own choice of colours would mix the colour of a bar with the colours at the edges of
    letters.
    """
    import numpy as np
    from PIL.Image import fromarray

    pixels = np.asarray(image).reshape(-1, 3).astype(int)
    found, places, counts = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    kept = found[np.argsort(-counts)[:COLOURS]]
    nearest = ((found[:, None] - kept) ** 2).sum(-1).argmin(-1).astype(np.uint8)
    few = fromarray(nearest[places].reshape(image.height, image.width))
    few.putpalette(kept.astype(np.uint8).tobytes())
    return few


def _only(page: str, sections: Sequence[str]) -> str:
    """Returns the page with only these sections, because a headless browser takes pictures of only
    the top of a page."""
    if not sections:
        return page
    kept = "".join(f":not([aria-labelledby={name}])" for name in sections)
    hidden = f"<style>header, nav, .numbers, section{kept} {{ display: none }}</style>"
    return page.replace("</head>", f"{hidden}</head>", 1)


if __name__ == "__main__":
    raise SystemExit(main())
