"""What a name stands for: files and folders by path, those that ship with the package, and those of the hub; uploads."""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from huggingface_hub import HfApi, constants, get_session, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, LocalTokenNotFoundError
from huggingface_hub.errors import HTTPError as ConnectionFault

from headstart.support.errors import UserError, cause
from headstart.support.files import RECIPES, as_path

EMBEDDED = "embedded"
"""Name of the small backbone that ships with the package."""
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Hub id of the other model that heads ship for."""
HEADS = {EMBEDDED: "quickstart/heads/eagle3", f"{EMBEDDED}-mlp": "quickstart/heads/mlp", "smollm2": "smollm2/heads"}
"""Names of the heads that ship with the package, and their folders: two for that backbone, one for SmolLM2."""


def resolve(path: str) -> str:
    """Map ``embedded`` to the folder of the backbone that ships with the package; return anything else unchanged."""
    return str(RECIPES / "quickstart" / "backbone") if path == EMBEDDED else path


def resolve_heads(path: str) -> Path | None:
    """Return the folder of the heads of that name (`HEADS`) that ship with the package; None for other paths.

    Heads in a folder of that name come first, as they do before repositories of the hub. Raises UserError for a name like those that is
    neither one of them nor a path.
    """
    if path in HEADS and not (Path(path) / "headstart.json").is_file():
        return RECIPES / HEADS[path]
    if path.startswith(f"{EMBEDDED}-") and "/" not in path and not Path(path).exists():
        raise UserError(f"no heads {path!r} ship with the project, and there is no such folder; {', '.join(HEADS)} do")
    return None


PATIENCE = 5.0
"""Seconds within which the hub has to answer."""


def find_folder(path: str | Path, what: str, files: Sequence[str] | None = None, revision: str | None = None) -> Path:
    """Return the folder ``path`` or, if there is none, download the hub repository of that id, only ``files`` (patterns) if given.

    ``revision``: the branch, tag or commit of a hub repository; None: its main branch.
    Raises UserError, saying ``what`` was looked for, if there is neither.
    """
    folder = as_path(what, path)
    if folder.is_dir():
        return folder
    try:
        with reaching(str(path)):
            return Path(snapshot_download(str(path), revision=revision, allow_patterns=None if files is None else list(files)))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        away = cut_off(str(path)) or f"not on the hub ({cause(error, 200)})"
        found = "that is a file" if folder.is_file() else f"no such folder, and {away}"
        raise UserError(f"no {what} at {str(path)!r}: {found}; give a folder or a hub id") from None


@contextmanager
def reaching(name: str) -> Iterator[None]:
    """Within this context the hub's libraries look up ``name`` in their cache alone, and try none for long, if it is out of reach."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or cut_off(name) is not None
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def cut_off(name: str) -> str | None:
    """Say that the hub cannot be asked for ``name``, and why; None if it answers, or if the name is here or no repository's."""
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is None or Path(name).exists():
        return None
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreachable(int(time.monotonic() // 60))
    return why and f"{constants.ENDPOINT} is out of reach ({why}), and its cache holds no whole copy"


@lru_cache(maxsize=1)
def _unreachable(minute: int) -> str | None:
    """Why the hub does not answer, asked once in that minute; None if it does."""
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except ConnectionFault as error:
        return cause(error, 100)
    return None


def is_hub_id(name: str) -> bool:
    """Return True for ``user/name`` where no file or folder of that name is here."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None and not Path(name).exists()


def upload(folder: Path, repo: str, private: bool) -> str:
    """Upload a folder to a repository of the hub, creating it if needed; returns its address.

    Raises UserError without a login, without the right to write, without network, or if the hub refuses.
    """
    api = HfApi()
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder)
    except LocalTokenNotFoundError:
        raise UserError("not logged in to the hub; run `hf auth login`, or set HF_TOKEN to a token that may write") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = "log in with a token that may write there (hf auth login)" if status in (401, 403) else "try again"
        raise UserError(f"the hub refused {repo} (status {status}: {cause(error, 200)}); {advice}") from None
    except (OSError, ConnectionFault) as error:  # OfflineModeIsEnabled is an OSError
        fault = f"{repo} could not be uploaded: no connection to the hub ({cause(error, 150)})"
        raise UserError(f"{fault}; go online, or use --dry-run OUT") from None
    return str(address)


def inside(folder: Path, name: str | Path) -> Path:
    """Return the path of a file of the folder, which need not exist.

    Raises UserError if no file can have the name, or if it or a link on the way leads out of the folder. The links of the hub's cache lead
    to the same repository's ``blobs`` and are followed.
    """
    path = folder / as_path(f"{folder} names a file", name)
    root, target = folder.resolve(), path.resolve()
    blobs = root.parent.parent / "blobs"  # the root is <cache>/<repository>/snapshots/<commit>
    if target.is_relative_to(root) or (root.parent.name == "snapshots" and target.is_relative_to(blobs)):
        return path
    fault = f"{path} leads out of the folder, to {target}"
    raise UserError(f"{fault}; fetch it from a source that you trust, or put a copy in place of the link")


def local_or_shipped(path: str | Path) -> Path:
    """Return the path; where nothing is there and it begins with ``recipes/``, the shipped file of that name if there is one.

    So `recipes/quickstart/eagle3.yaml` names the same file in a clone and, after `pip install`, in any folder. Raises UserError for a path
    that no file can have.
    """
    given = as_path("file", path)
    parts = given.parts
    if not given.exists() and len(parts) > 1 and parts[0] == "recipes" and ".." not in parts:
        shipped = RECIPES.joinpath(*parts[1:])
        if shipped.is_file():
            return shipped
    return given
