"""``python -m headstart.cli``: the command ``headstart``."""

import sys

from headstart.cli.main import main

sys.exit(main())
