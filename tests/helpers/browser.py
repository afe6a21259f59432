"""A page in a real browser, headless: what its scripts made of it, what they complained of, and how it looks."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROBE = """<script>
addEventListener('load', () => {
  document.body.dataset.wider = document.documentElement.scrollWidth > innerWidth;
  document.body.dataset.ground = getComputedStyle(document.body).backgroundColor;
});
</script>"""


@dataclass(frozen=True)
class Seen:
    """``dom``: the page after its scripts ran; ``console``: their messages; ``picture``: the screenshot."""

    dom: str
    console: list[str]
    picture: Path

    def data(self, name: str) -> str:
        """Return a value that the probe left in the body."""
        found = re.search(rf'data-{name}="([^"]*)"', self.dom)
        assert found is not None
        return found.group(1)


def browser() -> str:
    """Return the path of a browser; skips the test, in one line, where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no browser here: install chromium to test the pages in it")
    return found


def look(page: str, folder: Path, *, width: int = 1200, dark: bool = False, act: str = "") -> Seen:
    """Open a page, run the script ``act`` in it, and take its picture. Skips the test where there is no browser."""
    program = browser()
    file, picture = folder / "page.html", folder / f"page-{width}{'-dark' if dark else ''}.png"
    file.write_text(page.replace("</body>", f"{PROBE}<script>{act}</script></body>"), encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},1600"]
    options += ["--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"]
    options += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    done = subprocess.run([program, *options, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    shot = subprocess.run([program, *options, f"--screenshot={picture}", file.as_uri()], capture_output=True, text=True, timeout=600)
    assert shot.returncode == 0 and picture.stat().st_size > 5_000, shot.stderr[-2000:]
    return Seen(done.stdout, re.findall(r"CONSOLE[:(].*", done.stderr), picture)
