"""Attention of few queries in compiled functions: a C++ kernel, and its place in inductor.

torch's kernels are made for many queries: with them a compiled pass of the embedded backbone takes 1.4 to 2.0 times as long (LOG.md).
This one reads keys and values in the dtype of the cache, once for the query heads that share them, and leaves out blocks of slots
that no query sees. A score adds its products in the same order wherever the key lies, and sums over keys are kept in fp64 and
rounded once, as in `headstart.heads.backbone.tree_attention`: a node of a tree has the bits of the plain step that writes the same token.

Shape suffixes: B batch, H query heads, G key heads, N queries, S keys, C width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir, lowering, select_algorithm
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.utils import parallel_num_threads

from headstart.heads.backbone import tree_attention  # noqa: F401  (registers the operation)

OPERATION = torch.ops.headstart.few_queries
QUERIES = 16
"""Queries of a key head that are computed together: so many use a block of keys once it is in the cache."""

# The first part is the same for all layers, and is compiled once: layers differ in where their keys start.
SOURCE = r"""
{{template.header().getvalue()}}
#ifndef HEADSTART_ATTENTION
#define HEADSTART_ATTENTION
namespace headstart {

constexpr int64_t BLOCK = 16;          // keys of a block
constexpr float HIDDEN = -1e30f;       // the score of a masked key
using Floats = at::vec::Vectorized<float>;
using Doubles = at::vec::Vectorized<double>;
constexpr int64_t padded(int64_t size) { return (size + 15) / 16 * 16; }

template <typename T>
inline void to_floats(float* to, const T* from, int64_t size)
{
    int64_t i = 0;
    if constexpr (std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>) {
        using Halves = at::vec::Vectorized<T>;
        for (; i + Halves::size() <= size; i += Halves::size()) {
            const auto [low, high] = at::vec::convert_to_float<T>(Halves::loadu(from + i));
            low.store(to + i);
            high.store(to + i + Floats::size());
        }
    }
    for (; i < size; ++i) {
        if constexpr (std::is_same_v<T, bool>) {
            to[i] = from[i] ? 0.0f : HIDDEN;
        } else {
            to[i] = static_cast<float>(from[i]);
        }
    }
}

inline float sum_of(Floats parts)
{
    return at::vec::vec_reduce_all<float>([](const Floats& one, const Floats& other) { return one + other; }, parts);
}

inline float largest_of(Floats parts)
{
    return at::vec::vec_reduce_all<float>([](const Floats& one, const Floats& other) { return at::vec::maximum(one, other); }, parts);
}

// The scores of a block of keys: score += scale * (query . key). WIDTH is padded with zeros.
template <int64_t WIDTH>
inline void add_scores(float* scores, const float* query, const float* keys, float scale)
{
    constexpr int64_t VECTORS = WIDTH / Floats::size();
    for (int64_t key = 0; key < BLOCK; ++key) {
        Floats parts = Floats::loadu(query) * Floats::loadu(keys + key * WIDTH);
        #pragma GCC unroll 16
        for (int64_t i = 1; i < VECTORS; ++i) {
            const int64_t at = i * Floats::size();
            parts = at::vec::fmadd(Floats::loadu(query + at), Floats::loadu(keys + key * WIDTH + at), parts);
        }
        scores[key] += scale * sum_of(parts);
    }
}

// output += share * value, summed over a block of keys.
template <int64_t WIDTH>
inline void add_values(double* output, const float* shares, const double* values)
{
    constexpr int64_t STEP = WIDTH % (4 * Doubles::size()) == 0 ? 4 : 2;   // vectors of sums that are kept in registers
    for (int64_t start = 0; start < WIDTH; start += STEP * Doubles::size()) {
        Doubles sums[STEP];
        #pragma GCC unroll 4
        for (int64_t i = 0; i < STEP; ++i) {
            sums[i] = Doubles::loadu(output + start + i * Doubles::size());
        }
        for (int64_t key = 0; key < BLOCK; ++key) {
            const Doubles share(static_cast<double>(shares[key]));
            #pragma GCC unroll 4
            for (int64_t i = 0; i < STEP; ++i) {
                sums[i] = at::vec::fmadd(share, Doubles::loadu(values + key * WIDTH + start + i * Doubles::size()), sums[i]);
            }
        }
        #pragma GCC unroll 4
        for (int64_t i = 0; i < STEP; ++i) {
            sums[i].store(output + start + i * Doubles::size());
        }
    }
}

// Turns scores into shares that are not divided by their sum yet, which is returned.
inline double exponentials(float* scores, int64_t size)
{
    Floats highest(HIDDEN);
    for (int64_t i = 0; i < size; i += Floats::size()) {
        highest = at::vec::maximum(highest, Floats::loadu(scores + i));
    }
    const Floats largest(largest_of(highest));
    double sums[BLOCK] = {};
    for (int64_t start = 0; start < size; start += BLOCK) {
        for (int64_t i = start; i < start + BLOCK; i += Floats::size()) {
            (Floats::loadu(scores + i) - largest).exp().store(scores + i);
        }
        for (int64_t i = 0; i < BLOCK; ++i) {
            sums[i] += static_cast<double>(scores[start + i]);
        }
    }
    double total = 0;
    for (const double sum : sums) {
        total += sum;
    }
    return total;
}

struct Strides { int64_t head, position; };   // the numbers of one position lie side by side

// Queries first .. last - 1 of a key head, numbered by their head, then their place.
template <typename T, typename Mask, int64_t C, int64_t VALUE_C>
void attend(
    const T* queries, const T* keys, const T* values, const Mask* mask, T* output, float scale, int64_t first, int64_t last, int64_t N,
    int64_t S, Strides query, Strides key, Strides value, Strides masked, Strides out)
{
    constexpr int64_t WIDTH = padded(C), VALUE_WIDTH = padded(VALUE_C);
    const int64_t count = last - first, slots = padded(S);
    alignas(64) float block[BLOCK * std::max(WIDTH, VALUE_WIDTH)] = {}, query_floats[{{queries}} * WIDTH] = {};
    alignas(64) double value_doubles[BLOCK * VALUE_WIDTH], sums[{{queries}} * VALUE_WIDTH] = {};
    double totals[{{queries}}];
    const std::unique_ptr<float[]> scores(new float[count * slots]);
    for (int64_t q = 0; q < count; ++q) {
        const int64_t head = (first + q) / N, place = (first + q) % N;
        to_floats(query_floats + q * WIDTH, queries + head * query.head + place * query.position, C);
        float* row = scores.get() + q * slots;
        to_floats(row, mask + place * masked.position, S);
        std::fill(row + S, row + slots, HIDDEN);
        for (int64_t i = 0; i < slots; i += Floats::size()) {
            at::vec::maximum(Floats::loadu(row + i), Floats(HIDDEN)).store(row + i);
        }
    }
    const auto at_most = [&](float limit, int64_t start) {   // all queries' numbers of a block
        Floats highest(HIDDEN);
        for (int64_t q = 0; q < count; ++q) {
            for (int64_t i = start; i < start + BLOCK; i += Floats::size()) {
                highest = at::vec::maximum(highest, Floats::loadu(scores.get() + q * slots + i));
            }
        }
        return largest_of(highest) <= limit;
    };
    for (int64_t start = 0; start < S; start += BLOCK) {
        if (at_most(HIDDEN, start)) {
            continue;
        }
        for (int64_t i = 0; i < std::min(BLOCK, S - start); ++i) {
            to_floats(block + i * WIDTH, keys + (start + i) * key.position, C);
        }
        for (int64_t q = 0; q < count; ++q) {
            add_scores<WIDTH>(scores.get() + q * slots + start, query_floats + q * WIDTH, block, scale);
        }
    }
    for (int64_t q = 0; q < count; ++q) {
        totals[q] = exponentials(scores.get() + q * slots, slots);
    }
    for (int64_t start = 0; start < S; start += BLOCK) {
        if (at_most(0, start)) {
            continue;
        }
        for (int64_t i = 0; i < std::min(BLOCK, S - start); ++i) {
            to_floats(block + i * VALUE_WIDTH, values + (start + i) * value.position, VALUE_C);
        }
        for (int64_t i = 0; i < BLOCK * VALUE_WIDTH; ++i) {
            value_doubles[i] = block[i];
        }
        for (int64_t q = 0; q < count; ++q) {
            add_values<VALUE_WIDTH>(sums + q * VALUE_WIDTH, scores.get() + q * slots + start, value_doubles);
        }
    }
    for (int64_t q = 0; q < count; ++q) {
        T* to = output + (first + q) / N * out.head + (first + q) % N * out.position;
        for (int64_t i = 0; i < VALUE_C; ++i) {
            to[i] = static_cast<T>(sums[q * VALUE_WIDTH + i] / totals[q]);
        }
    }
}

}  // namespace headstart
#endif

extern "C"
{{kernel.def_kernel(inputs={"query": query, "keys": keys, "values": values, "mask": mask}, outputs={"output": output})}}
{
    {{kernel.maybe_codegen_profile()}}
    using T = {{kernel.dtype(query)}};
    using Mask = {{kernel.dtype(mask)}};
    const int64_t B = {{kernel.size(query, 0)}}, N = {{kernel.size(query, 2)}}, G = {{kernel.size(keys, 1)}}, S = {{kernel.size(keys, 2)}};
    const int64_t group = {{kernel.size(query, 1)}} / G * N;   // queries of a key head
    const int64_t part = std::clamp<int64_t>((B * G * group + {{threads}} - 1) / {{threads}}, 1, {{queries}});
    const int64_t parts = (group + part - 1) / part;
    #pragma omp parallel for num_threads({{threads}}) if ({{threads}} > 1)
    for (int64_t task = 0; task < B * G * parts; ++task) {
        const int64_t b = task / parts / G, g = task / parts % G, first = task % parts * part;
        headstart::attend<T, Mask, {{kernel.size(query, 3)}}, {{kernel.size(values, 3)}}>(
            &{{kernel.index(query, [0, 0, 0, 0])}} + b * {{kernel.stride(query, 0)}} + g * (group / N) * {{kernel.stride(query, 1)}},
            &{{kernel.index(keys, [0, 0, 0, 0])}} + b * {{kernel.stride(keys, 0)}} + g * {{kernel.stride(keys, 1)}},
            &{{kernel.index(values, [0, 0, 0, 0])}} + b * {{kernel.stride(values, 0)}} + g * {{kernel.stride(values, 1)}},
            &{{kernel.index(mask, [0, 0, 0, 0])}} + b * {{kernel.stride(mask, 0)}},
            output + b * {{kernel.stride(output, 0)}} + g * (group / N) * {{kernel.stride(output, 2)}}, {{scale}}f,
            first, std::min(first + part, group), N, S,
{%- for node in (query, keys, values, mask) %}
            { {{kernel.stride(node, 1)}}, {{kernel.stride(node, 2)}} },
{%- endfor %}
            { {{kernel.stride(output, 2)}}, {{kernel.stride(output, 1)}} });
    }
}
"""


class AttentionTemplate(CppTemplate):
    """The kernel for given inputs; the output is ``[B, N, H, C]`` without gaps."""

    def __init__(self, input_nodes: list[Any], layout: ir.Layout, scale: float) -> None:
        super().__init__("attention", input_nodes, layout, parallel_num_threads())
        self.scale = scale

    def render(self, **given: Any) -> str:
        assert not given.get("epilogue_nodes"), "nothing is fused into it"
        nodes = dict(zip(("query", "keys", "values", "mask"), self.input_nodes, strict=True))
        nodes["output"] = given.get("template_buffer_node") or self.output_node
        numbers = {"scale": self.scale, "threads": self.num_threads, "queries": QUERIES}
        source: str = self._template_from_string(SOURCE).render(template=self, kernel=given["kernel"], **nodes, **numbers)
        return source


@lowering.register_lowering(OPERATION, type_promotion_kind=None)
def _compile(query_BHNC: Any, keys_BGSC: Any, values_BGSC: Any, mask_B1NS: Any, scale: float) -> Any:
    if not pick_vec_isa():
        return lowering.fallback_handler(OPERATION.default)(query_BHNC, keys_BGSC, values_BGSC, mask_B1NS, scale)
    inputs = select_algorithm.realize_inputs(query_BHNC, keys_BGSC, values_BGSC, mask_B1NS)
    (B, H, N, _), C = query_BHNC.get_size(), values_BGSC.get_size()[-1]
    layout = ir.FixedLayout(torch.device("cpu"), query_BHNC.get_dtype(), [B, N, H, C])
    return AttentionTemplate(inputs, layout, float(scale)).generate().output_node()
