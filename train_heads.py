"""Train lookahead heads: accelerate launch train_heads.py RECIPE [section.key=value ...]"""

import sys

from headstart.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
