"""Lines for the user that are no errors: through `logging`, so that a program may silence or keep them."""

from __future__ import annotations

import logging
import os

from headstart.support.errors import one_line


def notice(line: str) -> None:
    """Print one line on standard error, unless logging is set up otherwise; of several processes the first does."""
    if int(os.environ.get("RANK", "0")) == 0:
        logging.getLogger("headstart").warning("%s", one_line(line))
