"""Files that a card, an index or a manifest names: they lie in its folder, also behind links."""

from __future__ import annotations

from pathlib import Path

from headstart.support.errors import UserError
from headstart.support.files import as_path


def inside(folder: Path, name: str | Path) -> Path:
    """Return the path of a file of the folder, which need not exist.

    Raises UserError if no file can have the name, or if it or a link on the way leads out of the folder. The links of the hub's cache lead
    to the same repository's ``blobs`` and are followed.
    """
    path = folder / as_path(f"{folder} names a file", name)
    root, target = folder.resolve(), path.resolve()
    blobs = root.parent.parent / "blobs"   # the root is <cache>/<repository>/snapshots/<commit>
    if target.is_relative_to(root) or (root.parent.name == "snapshots" and target.is_relative_to(blobs)):
        return path
    fault = f"{path} leads out of the folder, to {target}"
    raise UserError(f"{fault}; fetch it from a source that you trust, or put a copy in place of the link")
