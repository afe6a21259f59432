"""vllm_driver.py with kernels for 8-bit weights that multiply with what the values stand for, since vLLM's own run on a GPU only.

    python dequantizing_driver.py JOB.json RESULT.json

Everything else is vLLM's: it reads ``quantization_config``, chooses the scheme, makes the parameters, and loads and joins the tensors.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).parents[2] / "inference" / "serving" / "verify" / "vllm_driver.py"


def use_slow_kernels() -> None:
    """Put the kernels into vLLM's tables for the CPU, where 0.32 has none for these schemes."""
    import vllm.model_executor.kernels.linear as kernels
    from torch.nn.functional import linear
    from vllm.platforms import PlatformEnum

    class Int8(kernels.MPLinearKernel):
        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            import torch

            self.weight = (layer.weight_packed.data.contiguous().view(torch.uint8).float() - 128) * layer.weight_scale.data.float()

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return linear(x, self.weight.to(x.dtype), bias)

    class Fp8(kernels.FP8ScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            self.weight = layer.weight.data.float().t() * layer.weight_scale.data.float()  # vLLM has transposed it

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return linear(x, self.weight.to(x.dtype), bias)

        def apply_scaled_mm(self, **_: Any) -> Any:
            raise AssertionError("apply_weights computes the product; vLLM does not call this then")

    kernels._POSSIBLE_KERNELS[PlatformEnum.CPU] = [Int8]
    kernels._POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CPU] = [Fp8]


if __name__ == "__main__":
    driver = runpy.run_path(str(DRIVER))
    os.environ.update(driver["ENVIRONMENT"])
    use_slow_kernels()
    driver["main"](Path(sys.argv[1]), Path(sys.argv[2]))
