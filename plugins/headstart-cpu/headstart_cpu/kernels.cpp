// Products and attention of few rows for compiled layers on a CPU, as operations of torch.
//
// A row has the same bits among any number of rows: every sum adds its products in one order, sums over keys in that of the keys.
// Written with vectors of the compiler, as long as the processor's registers: of longer ones GCC makes single numbers.
//
// Shape suffixes: B batch, H query heads, G key heads, N queries, S keys, C width of a head, M rows, K inputs, O outputs of a block.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/Utils.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define UNROLL _Pragma("GCC unroll 16")
#if defined(__x86_64__)
#define KEEP(vector) asm("" : "+v"(vector))   // in a register: GCC reads it from memory wherever it is used
#else
#define KEEP(vector)
#endif

namespace {

using at::Tensor;
using std::int64_t;
using Bits = uint16_t;                                             // a number in bf16
#if defined(__AVX512F__)
constexpr int64_t LANES = 16;     // numbers of a vector
constexpr int64_t ROWS = 12;      // of a block: its sums fill 24 of 32 registers
#elif defined(__AVX2__)
constexpr int64_t LANES = 8;
constexpr int64_t ROWS = 6;       // 12 of 16
#else
constexpr int64_t LANES = 4;
constexpr int64_t ROWS = 6;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef double Doubles __attribute__((vector_size(4 * LANES), aligned(8)));   // half as many
constexpr int64_t OUTPUTS = 32;      // of a block of packed weights

template <typename V> inline V load(const void* from) { V value; std::memcpy(&value, from, sizeof value); return value; }
template <typename V> inline void store(void* to, const V& value) { std::memcpy(to, &value, sizeof value); }
inline Floats spread(float x) { return x - Floats{}; }   // without an addition: -0 + 0 is another number
inline float from_bits(Bits x) { return std::bit_cast<float>(uint32_t(x) << 16); }
inline Floats low(Words pairs) { pairs <<= 16; return (Floats)pairs; }
inline Floats high(Words pairs) { pairs &= 0xffff0000u; return (Floats)pairs; }
inline Floats widened(const Bits* from)
{
#if defined(__AVX512F__)   // GCC makes five instructions of the other
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16);
#else
    return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16);
#endif
}

constexpr float HIDDEN = -1e30f;     // the score of a masked key

template <typename T>
inline void to_floats(float* to, const T* from, int64_t size)
{
    int64_t i = 0;
    if constexpr (std::is_same_v<T, Bits>)
        for (; i + LANES <= size; i += LANES) store(to + i, widened(from + i));
    for (; i < size; ++i) {
        if constexpr (std::is_same_v<T, bool>) to[i] = from[i] ? 0.0f : HIDDEN;
        else if constexpr (std::is_same_v<T, Bits>) to[i] = from_bits(from[i]);
        else to[i] = from[i];
    }
}

inline Integers widened(const uint8_t* from)
{
#if defined(__AVX512F__)
    return (Integers)_mm512_cvtepu8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
    return (Integers)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load<int64_t>(from)));
#else
    Integers made;
    for (int64_t i = 0; i < LANES; ++i) made[i] = from[i];
    return made;
#endif
}

inline Bits rounded(float x)
{
    const auto word = std::bit_cast<uint32_t>(x);
    if ((word & 0x7fffffffu) > 0x7f800000u) return Bits(word >> 16 | 0x40);   // NaN
    return Bits((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

inline void put(float x, float& to) { to = x; }
inline void put(float x, Bits& to) { to = rounded(x); }

template <typename T>
inline void finish(const float* sums, T* y, const float* bias, int64_t outputs)
{
    for (int64_t o = 0; o < outputs; ++o) put(bias ? sums[o] + bias[o] : sums[o], y[o]);
}

#if defined(__clang__)
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else   // GCC has that from 12 on
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, Integers{__VA_ARGS__})
#endif

// The halves of every 2 * HALF numbers added up, first those of a, then those of b.
template <int64_t HALF, size_t... I>
inline Floats halved(Floats a, Floats b, std::index_sequence<I...>)
{
    constexpr auto from = [](int64_t i) { return i / HALF * 2 * HALF + i % HALF; };
    return SHUFFLED(a, b, from(I)...) + SHUFFLED(a, b, (from(I) + HALF)...);
}

// Lane i is the sum of vector i, added up in the same order for every i: halves, then quarters and so on.
template <int64_t COUNT = LANES>
inline __attribute__((always_inline)) Floats sums_of(const Floats* v)
{
    if constexpr (COUNT == 1) return *v;
    else {
        Floats sums[COUNT / 2];
        UNROLL for (int64_t i = 0; i < COUNT / 2; ++i) sums[i] = halved<COUNT / 2>(v[2 * i], v[2 * i + 1], std::make_index_sequence<LANES>());
        return sums_of<COUNT / 2>(sums);
    }
}

// Calls f with the number of rows as a constant.
template <int64_t MOST, typename F>
inline void with_rows(int64_t rows, F f)
{
    if constexpr (MOST > 0) {
        if (rows == MOST) f(std::integral_constant<int64_t, MOST>());
        else with_rows<MOST - 1>(rows, f);
    }
}

#include "codes.h"

// Products. A packed weight [blocks, K, OUTPUTS] holds the weights of one input side by side; in bf16 [blocks, K / 2, OUTPUTS, 2].

constexpr int64_t PART = 2 * INPUTS;   // inputs whose weights are made before they are used

struct Part {
    const float* weights;   // [n, OUTPUTS]
    int64_t n;
    const char* next;       // where the weights that follow lie, to be fetched meanwhile
    int64_t step;           // bytes of an input's
};

// The weights of n inputs of a block, from input k on; those that are not so in memory are written to `made`.
inline Part part(const float* w, int64_t block, int64_t K, int64_t k, int64_t n, float*)
{
    const float* from = w + (block * K + k) * OUTPUTS;
    return {from, n, (const char*)(from + n * OUTPUTS), OUTPUTS * sizeof(float)};
}

inline Part part(const Bits* w, int64_t block, int64_t K, int64_t k, int64_t n, float* made)
{
    const Bits* from = w + (block * K + k) * OUTPUTS;
    for (int64_t i = 0; i < n; i += 2)
        for (int64_t o = 0; o < OUTPUTS; o += LANES) {
            const auto pairs = load<Words>(from + i * OUTPUTS + 2 * o);
            store(made + i * OUTPUTS + o, low(pairs));
            store(made + (i + 1) * OUTPUTS + o, high(pairs));
        }
    return {made, n, (const char*)(from + n * OUTPUTS), OUTPUTS * sizeof(Bits)};
}

inline Part part(const char* w, int64_t block, int64_t, int64_t k, int64_t n, float* made)
{
    Part found{made, n};
    with_codes(w, block, [&](const auto* codes, bool round) {
        const auto* from = codes + k / INPUTS;
        for (int64_t i = 0; i < n / INPUTS; ++i) {
            float* to = made + i * INPUTS * OUTPUTS;
            round ? unpack<true>(from[i], to) : unpack<false>(from[i], to);
        }
        found.next = (const char*)(from + n / INPUTS);
        found.step = sizeof *from / INPUTS;
    });
    return found;
}

// sums [R, OUTPUTS] += x [R, n] weights [n, OUTPUTS], V vectors of outputs at a time. Inlined, GCC keeps the sums in memory.
template <int64_t R>
__attribute__((noinline)) void add(const float* x, int64_t K, const Part& of, float* sums)
{
    constexpr int64_t V = (R + 1) * OUTPUTS <= 2 * ROWS * LANES ? OUTPUTS / LANES : 2;   // so many that weights have registers too
    for (int64_t o = 0; o < OUTPUTS; o += V * LANES) {
        Floats s[R][V], weights[V];
        const char* next = of.next + o * of.step / OUTPUTS;
        UNROLL for (int64_t r = 0; r < R; ++r)
            UNROLL for (int64_t v = 0; v < V; ++v) s[r][v] = load<Floats>(sums + r * OUTPUTS + o + v * LANES);
        for (int64_t k = 0; k < of.n; ++k) {
            UNROLL for (int64_t at = 0; at < V * LANES; at += 16) __builtin_prefetch(next + at * 4);
            next += of.step;
            UNROLL for (int64_t v = 0; v < V; ++v) {
                weights[v] = load<Floats>(of.weights + k * OUTPUTS + o + v * LANES);
                KEEP(weights[v]);
            }
            UNROLL for (int64_t r = 0; r < R; ++r) {
                Floats in = spread(x[r * K + k]);
                KEEP(in);
                UNROLL for (int64_t v = 0; v < V; ++v) s[r][v] += in * weights[v];
            }
        }
        UNROLL for (int64_t r = 0; r < R; ++r)
            UNROLL for (int64_t v = 0; v < V; ++v) store(sums + r * OUTPUTS + o + v * LANES, s[r][v]);
    }
}

// Adds in fp32, weights of any kind.
template <typename T, typename W>
void multiply_floats(const T* x, const W* w, T* y, const float* bias, int64_t M, int64_t K, int64_t N)
{
    std::vector<float> wide;
    const float* rows;
    if constexpr (std::is_same_v<T, float>) rows = x;
    else {
        wide.resize(M * K);
        to_floats(wide.data(), x, M * K);
        rows = wide.data();
    }
    const int64_t blocks = (N + OUTPUTS - 1) / OUTPUTS;
    at::parallel_for(0, blocks, blocks * M * K < 1 << 14 ? blocks : 1, [&](int64_t first, int64_t last) {
        alignas(64) float made[PART * OUTPUTS];
        static thread_local std::vector<float> sums;
        for (int64_t block = first; block < last; ++block) {
            sums.assign(M * OUTPUTS, 0);
            for (int64_t k = 0; k < K; k += PART) {
                const int64_t n = std::min(PART, K - k);
                const Part weights = part(w, block, K, k, n, made);
                for (int64_t m = 0; m < M; m += ROWS)
                    with_rows<ROWS>(std::min(M - m, ROWS), [&](auto R) { add<R>(rows + m * K + k, K, weights, sums.data() + m * OUTPUTS); });
            }
            const int64_t at = block * OUTPUTS;
            for (int64_t m = 0; m < M; ++m)
                finish(sums.data() + m * OUTPUTS, y + m * N + at, bias ? bias + at : nullptr, std::min(OUTPUTS, N - at));
        }
    });
}

#if defined(__AVX512BF16__)
template <int64_t R>
inline void block(const Bits* x, const Bits* w, Bits* y, const float* bias, int64_t K, int64_t stride, int64_t outputs)
{
    float sums[R][OUTPUTS];
    __m512 s[R][2];
    UNROLL for (int64_t r = 0; r < R; ++r) s[r][0] = s[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k += 2) {
        const __m512bh a = (__m512bh)_mm512_loadu_si512(w + k * OUTPUTS), b = (__m512bh)_mm512_loadu_si512(w + k * OUTPUTS + 32);
        __builtin_prefetch(w + (k + 64) * OUTPUTS);
        __builtin_prefetch(w + (k + 65) * OUTPUTS);
        UNROLL for (int64_t r = 0; r < R; ++r) {
            const __m512bh in = (__m512bh)_mm512_set1_epi32(load<int32_t>(x + r * K + k));
            s[r][0] = _mm512_dpbf16_ps(s[r][0], in, a);
            s[r][1] = _mm512_dpbf16_ps(s[r][1], in, b);
        }
    }
    UNROLL for (int64_t r = 0; r < R; ++r) { _mm512_storeu_ps(sums[r], s[r][0]); _mm512_storeu_ps(sums[r] + LANES, s[r][1]); }
    for (int64_t r = 0; r < R; ++r) finish(sums[r], y + r * stride, bias, outputs);
}

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
// Tiles: 0 to 3 sums of two times 16 rows and two times 16 outputs, 4 and 5 those rows, 6 and 7 weights, of 32 inputs at a time.
constexpr int64_t TILE = 16, AHEAD = 8;

struct alignas(64) TileConfig { uint8_t palette = 1, start = 0, unused[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; };

// Tiles for a number of rows, which are lines of their tiles, or columns where x is `turned`; the others are whole. Without more than 16
// rows those of the lower 16 are not used.
inline void configure(bool turned, int64_t count)
{
    TileConfig config;
    const int64_t upper = std::min(count, TILE), lower = std::max<int64_t>(count - TILE, 1);
    const int64_t counts[8] = {
        upper, upper, lower, lower, turned ? TILE : upper, turned ? TILE : lower, turned ? upper : TILE, turned ? lower : TILE};
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = uint8_t(turned ? TILE : counts[i]);
        config.bytes[i] = uint16_t(4 * (turned ? counts[i] : TILE));
    }
    _tile_loadconfig(&config);
}

// Up to 32 rows of a block. A row's sums are added up in the same order among any number of rows.
inline void tiled(const Bits* x, const Bits* w, Bits* y, const float* bias, int64_t M, int64_t K, int64_t stride, int64_t outputs)
{
    alignas(64) float sums[2 * TILE][OUTPUTS];
    const bool more = M > TILE;
    _tile_zero(0);
    _tile_zero(1);
    if (more) { _tile_zero(2); _tile_zero(3); }
    for (int64_t k = 0; k < K; k += INPUTS) {
        const Bits* from = w + k * OUTPUTS;
        for (int64_t line = 0; line < INPUTS; ++line) __builtin_prefetch(from + (128 + line) * OUTPUTS);
        _tile_loadd(6, from, 4 * OUTPUTS);
        _tile_loadd(7, from + 2 * TILE, 4 * OUTPUTS);
        _tile_loadd(4, x + k, 2 * K);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (more) {
            _tile_loadd(5, x + TILE * K + k, 2 * K);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 4 * OUTPUTS);
    _tile_stored(1, sums[0] + TILE, 4 * OUTPUTS);
    if (more) { _tile_stored(2, sums[TILE], 4 * OUTPUTS); _tile_stored(3, sums[TILE] + TILE, 4 * OUTPUTS); }
    for (int64_t r = 0; r < M; ++r) finish(sums[r], y + r * stride, bias, outputs);
}

// The same with codes. Here 4 and 5 are weights, [outputs, inputs], and 6 and 7 the rows, turned: x [K / 2, M] of pairs.
template <typename C>
inline void tiled(const uint32_t* x, const C* w, Bits* y, const float* bias, int64_t M, int64_t rows, int64_t K, int64_t stride, int64_t outputs)
{
    alignas(64) float sums[OUTPUTS][2 * TILE];
    alignas(64) Pairs weights[2][OUTPUTS];   // one is written while the other is read
    const bool more = M > TILE;
    const auto write = [&](int64_t k) {
        const C* from = w + k / INPUTS;
        for (size_t line = 0; line < sizeof(C); line += 64) __builtin_prefetch((const char*)(from + AHEAD) + line);
        UNROLL for (int64_t o = 0; o < OUTPUTS; o += 2) decode(*from, o, weights[k / INPUTS % 2] + o);
    };
    _tile_zero(0);
    _tile_zero(1);
    if (more) { _tile_zero(2); _tile_zero(3); }
    write(0);
    for (int64_t k = 0; k < K; k += INPUTS) {
        if (k + INPUTS < K) write(k + INPUTS);
        const Pairs* from = weights[k / INPUTS % 2];
        _tile_loadd(4, from, 64);
        _tile_loadd(5, from + TILE, 64);
        _tile_loadd(6, x + k / 2 * rows, 4 * rows);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (more) {
            _tile_loadd(7, x + k / 2 * rows + TILE, 4 * rows);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 8 * TILE);
    _tile_stored(1, sums[TILE], 8 * TILE);
    if (more) { _tile_stored(2, sums[0] + TILE, 8 * TILE); _tile_stored(3, sums[TILE] + TILE, 8 * TILE); }
    for (int64_t r = 0; r < M; ++r) {
        float row[OUTPUTS];
        UNROLL for (int64_t o = 0; o < OUTPUTS; ++o) row[o] = sums[o][r];
        finish(row, y + r * stride, bias, outputs);
    }
}

// The same with tiles; false where there are none, or the inputs do not fill them.
template <typename W>
bool multiply_tiled(const Bits* x, const W* w, Bits* y, const float* bias, int64_t M, int64_t K, int64_t N)
{
    static const bool allowed = at::cpu::init_amx();
    constexpr bool coded = std::is_same_v<W, char>;
    if (!allowed || K % INPUTS) return false;
    std::vector<uint32_t> turned(coded ? K / 2 * M : 0);
    if (coded)
        for (int64_t m = 0; m < M; ++m)
            for (int64_t k = 0; k < K / 2; ++k) turned[k * M + m] = load<uint32_t>(x + m * K + 2 * k);
    at::parallel_for(0, (N + OUTPUTS - 1) / OUTPUTS, 1, [&](int64_t first, int64_t last) {
        int64_t configured = 0;
        for (int64_t n = first; n < last; ++n) {
            const int64_t at = n * OUTPUTS, outputs = std::min(OUTPUTS, N - at);
            for (int64_t m = 0; m < M; m += 2 * TILE) {
                const int64_t count = std::min(M - m, 2 * TILE);
                if (count != configured) configure(coded, count);
                configured = count;
                const float* b = bias ? bias + at : nullptr;
                const auto run = [&](const auto* of, bool) { tiled(turned.data() + m, of, y + m * N + at, b, count, M, K, N, outputs); };
                if constexpr (coded) with_codes(w, n, run);
                else tiled(x + m * K, w + at * K, y + m * N + at, b, count, K, N, outputs);
            }
        }
        _tile_release();
    });
    return true;
}
#else
template <typename W>
bool multiply_tiled(const Bits*, const W*, Bits*, const float*, int64_t, int64_t, int64_t) { return false; }
#endif

template <typename W>
void multiply(const Bits* x, const W* w, Bits* y, const float* bias, int64_t M, int64_t K, int64_t N)
{
    if (multiply_tiled(x, w, y, bias, M, K, N)) return;
    const int64_t blocks = (N + OUTPUTS - 1) / OUTPUTS;
    at::parallel_for(0, blocks, blocks * M * K < 1 << 14 ? blocks : 1, [&](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; ++n) {
            const int64_t at = n * OUTPUTS, outputs = std::min(OUTPUTS, N - at);
            const float* b = bias ? bias + at : nullptr;
            const auto run = [&](const auto* of, bool = false) {
                for (int64_t m = 0; m < M; m += ROWS)
                    with_rows<ROWS>(std::min(M - m, ROWS), [&](auto R) { block<R>(x + m * K, of, y + m * N + at, b, K, N, outputs); });
            };
            if constexpr (!std::is_same_v<W, char>) run(w + at * K);
            else if (M > ROWS) with_codes(w, n, [&](const auto* of, bool) { block_of_many(x, of, y + at, b, M, K, N, outputs); });
            else with_codes(w, n, run);
        }
    });
}
#else
template <typename W>
void multiply(const Bits* x, const W* w, Bits* y, const float* bias, int64_t M, int64_t K, int64_t N) { multiply_floats(x, w, y, bias, M, K, N); }
#endif

template <typename W>
void multiply(const float* x, const W* w, float* y, const float* bias, int64_t M, int64_t K, int64_t N) { multiply_floats(x, w, y, bias, M, K, N); }

// x [..., K], a packed weight of N outputs, in fp32 or, exact in it, in bf16, or codes as bytes: [..., N].
Tensor product(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, int64_t outputs)
{
    const Tensor x = input.contiguous();
    const int64_t K = x.size(-1), M = K ? x.numel() / K : 0, count = (outputs + OUTPUTS - 1) / OUTPUTS * OUTPUTS * K;
    const auto of = weight.scalar_type();
    TORCH_CHECK(x.scalar_type() == at::kFloat || of != at::kFloat, "a product's input and weight are of different dtypes");
    TORCH_CHECK(weight.is_contiguous() && (of == at::kByte ? weight.numel() > count / 4 : weight.numel() == count),
        "a product's packed weight has another size");
    auto sizes = x.sizes().vec();
    sizes.back() = outputs;
    Tensor y = at::empty(sizes, x.options());
    const auto run = [&](auto typed) {
        const auto *from = (const decltype(typed)*)x.const_data_ptr();
        const float* b = bias ? bias->const_data_ptr<float>() : nullptr;
        auto* to = (decltype(typed)*)y.data_ptr();
        const void* w = weight.const_data_ptr();
        if (of == at::kByte) multiply(from, (const char*)w, to, b, M, K, outputs);
        else if (of == at::kBFloat16) multiply(from, (const Bits*)w, to, b, M, K, outputs);
        else if constexpr (std::is_same_v<decltype(typed), float>) multiply(from, (const float*)w, to, b, M, K, outputs);
    };
    x.scalar_type() == at::kFloat ? run(float()) : run(Bits());
    return y;
}

// Puts the weight [N, K] of some outputs into a packed weight, from output `first`, a multiple of OUTPUTS, on.
template <typename T>
void arrange(const T* from, T* to, int64_t N, int64_t K, int64_t row, int64_t column)
{
    constexpr int64_t SIDE = std::is_same_v<T, Bits> ? 2 : 1;
    at::parallel_for(0, (N + OUTPUTS - 1) / OUTPUTS, 1, [&](int64_t first, int64_t last) {
        for (int64_t n = first * OUTPUTS; n < std::min(last * OUTPUTS, N); ++n)
            for (int64_t k = 0; k < K; ++k)
                to[n / OUTPUTS * OUTPUTS * K + k / SIDE * SIDE * OUTPUTS + n % OUTPUTS * SIDE + k % SIDE] = from[n * row + k * column];
    });
}

void pack(const Tensor& weight, Tensor& packed, int64_t first)
{
    const int64_t N = weight.size(0), K = weight.size(1), row = weight.stride(0), column = weight.stride(1);
    if (weight.scalar_type() == at::kBFloat16)
        arrange((const Bits*)weight.const_data_ptr(), (Bits*)packed.data_ptr() + first * K, N, K, row, column);
    else
        arrange(weight.const_data_ptr<float>(), packed.data_ptr<float>() + first * K, N, K, row, column);
}

// Attention.

constexpr int64_t KEYS = 16;         // of a block
constexpr int64_t QUERIES = 16;      // of a key head that are computed together: so many use a block of keys once it is in the cache

// Queries and keys are multiplied in bf16 where the processor does that, and else in fp32.
#if defined(__AVX512BF16__)
template <typename T> using Factor = T;
inline Floats add_product(Floats sum, const Bits* a, const Bits* b)
{
    return (Floats)_mm512_dpbf16_ps((__m512)sum, load<__m512bh>(a), load<__m512bh>(b));
}
#else
template <typename> using Factor = float;
#endif
inline Floats add_product(Floats sum, const float* a, const float* b) { return sum + load<Floats>(a) * load<Floats>(b); }
template <typename F> constexpr int64_t FACTORS = sizeof(Floats) / sizeof(F);   // of a vector
template <typename F> constexpr int64_t padded(int64_t size) { return (size + FACTORS<F> - 1) / FACTORS<F> * FACTORS<F>; }

template <typename F, typename T>
inline void to_factors(F* to, const T* from, int64_t size)
{
    if constexpr (std::is_same_v<F, T>) std::memcpy(to, from, size * sizeof(T));
    else to_floats(to, from, size);
}

// The scores of a block of keys: scale * (query . key) is added to each. Widths are padded with zeros; WIDTH 0: any.
template <int64_t WIDTH, typename F>
void add_scores(float* scores, const F* query, const F* keys, float scale, int64_t width)
{
    const int64_t W = WIDTH ? WIDTH : width;
    for (int64_t first = 0; first < KEYS; first += LANES) {
        Floats parts[LANES] = {};
        for (int64_t i = 0; i < W; i += FACTORS<F>)
            UNROLL for (int64_t key = 0; key < LANES; ++key) parts[key] = add_product(parts[key], query + i, keys + (first + key) * W + i);
        store(scores + first, load<Floats>(scores + first) + sums_of(parts) * scale);
    }
}

// output += share * value, key after key: so a masked key changes nothing, wherever it lies. Q queries and V vectors at a time.
template <int64_t Q, int64_t V>
inline void add_values(float* output, const float* shares, int64_t slots, const float* values, int64_t width)
{
    for (int64_t at = 0; at < width; at += V * LANES) {
        Floats sums[Q][V];
        UNROLL for (int64_t q = 0; q < Q; ++q)
            UNROLL for (int64_t v = 0; v < V; ++v) sums[q][v] = load<Floats>(output + q * width + at + v * LANES);
        for (int64_t key = 0; key < KEYS; ++key)
            UNROLL for (int64_t v = 0; v < V; ++v)
                UNROLL for (int64_t q = 0; q < Q; ++q)
                    sums[q][v] += load<Floats>(values + key * width + at + v * LANES) * shares[q * slots + key];
        UNROLL for (int64_t q = 0; q < Q; ++q)
            UNROLL for (int64_t v = 0; v < V; ++v) store(output + q * width + at + v * LANES, sums[q][v]);
    }
}

template <int64_t V>
void add_values(float* output, const float* shares, int64_t slots, const float* values, int64_t width, int64_t count)
{
    int64_t q = 0;
    for (; q + 2 <= count; q += 2) add_values<2, V>(output + q * width, shares + q * slots, slots, values, width);
    if (q < count) add_values<1, V>(output + q * width, shares + q * slots, slots, values, width);
}

// exp(x) for x <= 0, to a unit in the last place or two (Cephes): 2^n times a polynomial of what is left.
inline Floats exponential(Floats x)
{
    x = x < -87.0f ? spread(-87.0f) : x;
    const Floats n = x * 1.44269504088896341f + 12582912.0f - 12582912.0f;   // rounded to a whole number
    const Floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
    Floats y = spread(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return y * (Floats)((__builtin_convertvector(n, Integers) + 127) << 23);
}

// Turns scores, a multiple of KEYS of them, into shares that are not divided by their sum yet, which is returned.
double exponentials(float* scores, int64_t size)
{
    Floats highest = spread(HIDDEN);
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats some = load<Floats>(scores + i);
        highest = some > highest ? some : highest;
    }
    float each[LANES];
    store(each, highest);
    const float largest = *std::max_element(each, each + LANES);
    double total[LANES] = {}, sum = 0;
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats some = load<Floats>(scores + i), shares = some <= HIDDEN ? Floats{} : exponential(some - largest);
        store(scores + i, shares);
        for (int64_t lane = 0; lane < LANES; ++lane) total[lane] += double(shares[lane]);
    }
    for (int64_t i = 0; i < LANES; ++i) sum += total[i];
    return sum;
}

struct Strides { int64_t batch, head, position; };   // the numbers of one position lie side by side
struct Sizes { int64_t N, S, C, D; };                // D: width of a value

// Queries first .. last - 1 of a key head, numbered by their head, then their place.
template <typename T, typename Mask>
void attend(
    const T* queries, const T* keys, const T* values, const Mask* mask, T* output, float scale, int64_t first, int64_t last, Sizes of,
    Strides query, Strides key, Strides value, int64_t mask_row, Strides out)
{
    using F = Factor<T>;
    const int64_t width = padded<F>(of.C), value_width = padded<float>(of.D), count = last - first;
    const int64_t slots = ((of.S + KEYS - 1) / KEYS | 1) * KEYS;   // an odd number: rows 2^n bytes apart would share their places in the cache
    const auto scoring = width == 64 ? add_scores<64, F> : width == 96 ? add_scores<96, F> : width == 128 ? add_scores<128, F>
        : width == 256 ? add_scores<256, F> : add_scores<0, F>;
    const auto summing = value_width % (4 * LANES) ? add_values<1> : add_values<4>;
    static thread_local std::vector<F> factors;
    static thread_local std::vector<float> floats;
    factors.assign((KEYS + count) * width, F());
    floats.resize((KEYS + count) * value_width + count * slots);
    F* key_rows = factors.data();
    float *value_rows = floats.data(), *sums = value_rows + KEYS * value_width, *scores = sums + count * value_width;
    double totals[QUERIES];
    std::fill(value_rows, scores, 0.0f);
    for (int64_t q = 0; q < count; ++q) {
        const int64_t head = (first + q) / of.N, place = (first + q) % of.N;
        to_factors(key_rows + (KEYS + q) * width, queries + head * query.head + place * query.position, of.C);
        float* row = scores + q * slots;
        to_floats(row, mask + place * mask_row, of.S);
        std::fill(row + of.S, row + slots, HIDDEN);
        for (int64_t i = 0; i < of.S; ++i) row[i] = std::max(row[i], HIDDEN);
    }
    const auto seen = [&](float above, int64_t start) {   // whether any query has a larger number in a block
        for (int64_t q = 0; q < count; ++q)
            for (int64_t i = start; i < start + KEYS; ++i)
                if (scores[q * slots + i] > above) return true;
        return false;
    };
    for (int64_t start = 0; start < of.S; start += KEYS) {
        if (!seen(HIDDEN, start)) continue;
        for (int64_t i = 0; i < std::min(KEYS, of.S - start); ++i) to_factors(key_rows + i * width, keys + (start + i) * key.position, of.C);
        for (int64_t q = 0; q < count; ++q) scoring(scores + q * slots + start, key_rows + (KEYS + q) * width, key_rows, scale, width);
    }
    for (int64_t q = 0; q < count; ++q) totals[q] = exponentials(scores + q * slots, slots);
    for (int64_t start = 0; start < of.S; start += KEYS) {
        if (!seen(0, start)) continue;
        for (int64_t i = 0; i < std::min(KEYS, of.S - start); ++i)
            to_floats(value_rows + i * value_width, values + (start + i) * value.position, of.D);
        summing(sums, scores + start, slots, value_rows, value_width, count);
    }
    for (int64_t q = 0; q < count; ++q) {
        T* to = output + (first + q) / of.N * out.head + (first + q) % of.N * out.position;
        for (int64_t d = 0; d < of.D; ++d) put(float(sums[q * value_width + d] / totals[q]), to[d]);
    }
}

// query [B, H, N, C], keys and values [B, G, S, C], mask [B, 1, N, S], additive or boolean: [B, N, H, C].
Tensor attention(const Tensor& query_, const Tensor& keys_, const Tensor& values_, const Tensor& mask_, double scale)
{
    const auto dense = [](const Tensor& one) { return one.stride(-1) == 1 ? one : one.contiguous(); };
    const Tensor query = dense(query_), keys = dense(keys_), values = dense(values_);
    const int64_t B = query.size(0), H = query.size(1), G = keys.size(1);
    const Sizes of{query.size(2), mask_.size(-1), query.size(3), values.size(3)};
    TORCH_CHECK(mask_.size(1) == 1 && keys.size(2) >= of.S && values.size(2) >= of.S, "attention has fewer keys than its mask");
    const Tensor mask = (mask_.stride(-1) == 1 ? mask_ : mask_.contiguous()).expand({B, 1, of.N, of.S});
    Tensor output = at::empty({B, of.N, H, of.D}, query.options());
    const int64_t group = H / G * of.N;   // queries of a key head, in parts: as many for every thread
    int64_t parts = (group + QUERIES - 1) / QUERIES;
    while (parts < group && B * G * parts % at::get_num_threads()) ++parts;
    const int64_t part = (group + parts - 1) / parts;
    const auto strides = [](const Tensor& one) { return Strides{one.stride(0), one.stride(1), one.stride(2)}; };
    const Strides q = strides(query), k = strides(keys), v = strides(values), out{output.stride(0), output.stride(2), output.stride(1)};
    const auto run = [&](auto typed, auto masked) {
        using T = decltype(typed);
        using Mask = decltype(masked);
        at::parallel_for(0, B * G * parts, 1, [&](int64_t begin, int64_t end) {
            for (int64_t task = begin; task < end; ++task) {
                const int64_t b = task / parts / G, g = task / parts % G, first = task % parts * part;
                attend<T, Mask>(
                    (const T*)query.const_data_ptr() + b * q.batch + g * (H / G) * q.head, (const T*)keys.const_data_ptr() + b * k.batch + g * k.head,
                    (const T*)values.const_data_ptr() + b * v.batch + g * v.head, (const Mask*)mask.const_data_ptr() + b * mask.stride(0),
                    (T*)output.data_ptr() + b * out.batch + g * (H / G) * out.head, float(scale), first, std::min(first + part, group), of, q, k, v,
                    mask.stride(2), out);
            }
        });
    };
    const auto by_mask = [&](auto typed) {
        if (mask.scalar_type() == at::kBool) run(typed, bool());
        else if (mask.scalar_type() == at::kBFloat16) run(typed, Bits());
        else run(typed, float());
    };
    TORCH_CHECK(keys.scalar_type() == query.scalar_type() && values.scalar_type() == query.scalar_type(), "attention of different dtypes");
    if (query.scalar_type() == at::kBFloat16) by_mask(Bits());
    else by_mask(float());
    return output;
}

}  // namespace

// What compiled layers call (`SHIMS` of kernels.py): by name, since torch's dispatcher takes some 10 us a call more.

static const Tensor& tensor(AtenTensorHandle handle) { return *torch::aot_inductor::tensor_handle_to_tensor_pointer(handle); }

extern "C" AOTITorchError aoti_torch_cpu_product(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, int64_t outputs, AtenTensorHandle* result)
{
    AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
        const auto b = bias ? std::make_optional(tensor(*bias)) : std::nullopt;
        *result = torch::aot_inductor::new_tensor_handle(product(tensor(x), tensor(weight), b, outputs));
    });
}

extern "C" AOTITorchError aoti_torch_cpu_attention(
    AtenTensorHandle query, AtenTensorHandle keys, AtenTensorHandle values, AtenTensorHandle mask, double scale, AtenTensorHandle* result)
{
    AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE(
        { *result = torch::aot_inductor::new_tensor_handle(attention(tensor(query), tensor(keys), tensor(values), tensor(mask), scale)); });
}

TORCH_LIBRARY_IMPL(headstart_cpu, CPU, m)
{
    m.impl("product", product);
    m.impl("pack", pack);
    m.impl("encoded", encoded);
    m.impl("attention", attention);
}
