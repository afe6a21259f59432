"""mkdocs hooks: the README as the first page, pages that lie outside docs/, and links that lead out of the site."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent.parent
OUTSIDE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "log.md": "LOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Page of the site -> file of the repository."""
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside docs/."""
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn the links between files of the repository into links of the site; what is not on the site stays as its text."""
    name = page.file.src_uri
    folder = posixpath.dirname(OUTSIDE.get(name, f"docs/{name}"))
    pages = {f"docs/{file.src_uri}": file.src_uri for file in files if file.src_uri not in OUTSIDE and file.inclusion.is_included()}
    pages |= {source: target for target, source in OUTSIDE.items()}

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in pages:
            return f"[{text}]({pages[path]}{anchor or ''})"
        return text if (ROOT / path).exists() else found.group()  # a dead link stays, so that the strict build fails

    return LINK.sub(link, markdown).replace("](docs/tree.svg)", "](tree.svg)")
