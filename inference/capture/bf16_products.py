"""Products with bf16 weights in compiled functions: a kernel for few rows that inductor fills into its template.

Without it inductor calls oneDNN, with which a pass of the embedded backbone over one to five nodes takes 1.4 to 1.7 times as long (LOG.md):
a call costs some 10 microseconds before it reads a weight. Inductor's own kernel for bf16 without AMX multiplies in fp32, so that a row
costs more. Every sum adds pairs of products in the order of the inputs, whatever the number of rows, so a row has the same bits alone and
among others. With AMX oneDNN's products are kept.

Shape suffixes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import config, select_algorithm
from torch._inductor.codegen.common import KernelTemplate
from torch._inductor.codegen.cpp_micro_gemm import CppMicroGemm, LayoutType, generate_gemm_config, micro_gemm_configs
from torch._inductor.cpu_vec_isa import VecAMX, VecAVX512VNNI, pick_vec_isa

ROWS, OUTPUTS, PAIR = 6, 64, 2
"""A block: its sums fill 24 of 32 registers."""
OPTIONS: dict[str, Any] = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP,ATEN"}

SOURCE = r"""
template <int64_t ROWS, bool accum>
__attribute__((target("avx512f,avx512bf16"))) void {{kernel_name}}_rows(
    const {{input_t}}* __restrict__ A, const {{input2_t}}* __restrict__ B, float* __restrict__ C,
    int64_t K, int64_t lda, int64_t ldb, int64_t ldc)
{
    constexpr int64_t VECTORS = {{block_n}} / 16, AHEAD = 32;   // prefetches 4 KB ahead
    __m512 sums[ROWS][VECTORS];
    #pragma GCC unroll 8
    for (int64_t row = 0; row < ROWS; ++row) {
        #pragma GCC unroll 8
        for (int64_t i = 0; i < VECTORS; ++i) {
            sums[row][i] = accum ? _mm512_loadu_ps(C + row * ldc + 16 * i) : _mm512_setzero_ps();
        }
    }
    for (int64_t k = 0; k < K; k += 2) {   // the weights of a pair of inputs lie side by side
        __m512bh weights[VECTORS];
        #pragma GCC unroll 8
        for (int64_t i = 0; i < VECTORS; ++i) {
            weights[i] = (__m512bh)_mm512_loadu_si512(B + k * ldb + 32 * i);
            _mm_prefetch(reinterpret_cast<const char*>(B + (k + AHEAD) * ldb + 32 * i), _MM_HINT_T0);
        }
        #pragma GCC unroll 8
        for (int64_t row = 0; row < ROWS; ++row) {
            int32_t pair;
            std::memcpy(&pair, A + row * lda + k, sizeof(pair));
            const __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
            #pragma GCC unroll 8
            for (int64_t i = 0; i < VECTORS; ++i) {
                sums[row][i] = _mm512_dpbf16_ps(sums[row][i], inputs, weights[i]);
            }
        }
    }
    #pragma GCC unroll 8
    for (int64_t row = 0; row < ROWS; ++row) {
        #pragma GCC unroll 8
        for (int64_t i = 0; i < VECTORS; ++i) {
            _mm512_storeu_ps(C + row * ldc + 16 * i, sums[row][i]);
        }
    }
}

{{declare_kernel}} {
    for (int64_t n = 0; n < N; n += {{block_n}}) {
        for (int64_t m = 0; m < M; m += {{block_m}}) {
            switch (std::min<int64_t>(M - m, {{block_m}})) {
{%- for rows in range(1, block_m + 1) %}
                case {{rows}}: {{kernel_name}}_rows<{{rows}}, accum>(A + m * lda, B + 2 * n, C + m * ldc + n, K, lda, ldb, ldc); break;
{%- endfor %}
            }
        }
    }
}
"""


class BF16Products(CppMicroGemm):
    """The kernel: ``C = A B``, or ``C += A B``, with A ``[M, K]`` and B ``[K, N]`` in bf16, C in fp32; N in blocks of `OUTPUTS`, K even."""

    def codegen_define(self, kernel: Any) -> str:
        block = self.register_blocking
        options = {"declare_kernel": self.get_kernel_declaration(), "block_m": block.block_m, "block_n": block.block_n}
        source: str = KernelTemplate._template_from_string(SOURCE).render(options | self.get_common_options())
        return source

    def get_b_layout(self) -> LayoutType:
        return LayoutType.VNNI2


def _fits(_config: Any, m: Any, n: Any, k: int, alpha: float, *_others: Any, **_more: Any) -> bool:
    return k % PAIR == 0 and alpha == 1


def _templates_first(choices: list[Any]) -> list[Any]:
    """Leave out libraries' kernels where there is a template: nothing is timed, and all graphs multiply with the same kernel."""
    return [one for one in choices if not isinstance(one, select_algorithm.ExternKernelCaller)] or choices


def available() -> bool:
    """True if this CPU has bf16 instructions without AMX, and a compiler for them."""
    isa = pick_vec_isa()
    return isinstance(isa, VecAVX512VNNI) and not isinstance(isa, VecAMX) and bool(isa.is_avx512_bf16_supported())


@contextmanager
def bf16_products() -> Iterator[None]:
    """Within this context inductor compiles products in bf16 with this kernel, where it is `available`."""
    if not available():
        yield
        return
    blocks = generate_gemm_config(VecAVX512VNNI, [(ROWS, OUTPUTS, PAIR)], torch.bfloat16, output_dtype=torch.float32, extra_check=_fits)
    selector = select_algorithm.get_algorithm_selector_cache()
    preferred = patch.object(selector, "preprocessing_fns", [*selector.preprocessing_fns, _templates_first])
    with patch.dict(micro_gemm_configs, {BF16Products: blocks}), preferred, config.patch(OPTIONS):
        yield
