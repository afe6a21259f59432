"""Folders by path or hub id, and uploads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, LocalTokenNotFoundError
from huggingface_hub.errors import HTTPError as ConnectionFault

from headstart.support.errors import UserError
from headstart.support.files import as_path


def find_folder(path: str | Path, what: str, files: Sequence[str] | None = None, revision: str | None = None) -> Path:
    """Return the folder ``path`` or, if there is none, download the hub repository of that id, only ``files`` (patterns) if given.

    ``revision``: the branch, tag or commit of a hub repository; None: its main branch.
    Raises UserError, saying ``what`` was looked for, if there is neither.
    """
    folder = as_path(what, path)
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(str(path), revision=revision, allow_patterns=None if files is None else list(files)))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        cause = "it cannot be reached" if isinstance(error, LocalEntryNotFoundError) else " ".join(str(error).split())[:200]
        fault = f"no {what} at {str(path)!r}: no such folder, and not on the hub ({cause}); give a folder or a hub id"
        raise UserError(fault) from None


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
        status, cause = error.response.status_code, " ".join(str(error).split())[:200]
        advice = "log in with a token that may write there (hf auth login)" if status in (401, 403) else "try again"
        raise UserError(f"the hub refused {repo} (status {status}: {cause}); {advice}") from None
    except (OSError, ConnectionFault) as error:   # OfflineModeIsEnabled is an OSError
        cause = " ".join(str(error).split())[:150]
        raise UserError(f"{repo} could not be uploaded: no connection to the hub ({cause}); go online, or use --dry-run OUT") from None
    return str(address)
