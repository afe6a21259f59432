"""Tests use no network and one thread each (on a busy two-core machine that is several times faster than two)."""
import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    OMP_NUM_THREADS="1",   # for the processes that tests start
)

import torch  # noqa: E402  (the libraries read these when imported)

torch.set_num_threads(1)
