// Weights in bf16 that were dequantized from blocks of 4 bits (GGUF's Q4_0, Q4_1 and Q4_K): scale * code + offset, rounded, for every output and
// 32 inputs. So packed, [blocks, K / INPUTS] of `Codes`, they take three eighths of the memory, and products make the same numbers of them in
// registers. Scale, offset and codes are found from the numbers alone, whatever file they are from. Part of kernels.cpp, for processors with
// AVX-512's bf16: with AVX2 one row took longer so.

constexpr int64_t INPUTS = 32;
struct Codes {
    float scales[OUTPUTS], offsets[OUTPUTS];
    uint16_t codes[OUTPUTS / 4][INPUTS];   // an input's codes of four outputs: the first one's are the lowest bits
};

#if defined(__AVX512BF16__)
inline const Codes* from_output(const Codes* w, int64_t output, int64_t K) { return w + output / OUTPUTS * (K / INPUTS); }
using Pairs = __m512bh;   // INPUTS numbers in bf16

// Weights of outputs o and o + 1: each has 16 different ones, which the codes select.
inline void decode(const Codes& from, int64_t o, Pairs* to)
{
    const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 first = _mm512_fmadd_ps(all, _mm512_set1_ps(from.scales[o]), _mm512_set1_ps(from.offsets[o]));
    const __m512 second = _mm512_fmadd_ps(all, _mm512_set1_ps(from.scales[o + 1]), _mm512_set1_ps(from.offsets[o + 1]));
    const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(second, first), codes = _mm512_loadu_si512(from.codes[o / 4]), four = _mm512_set1_epi16(15);
    const __m512i one = _mm512_and_si512(_mm512_srli_epi16(codes, o % 4 * 4), four);
    const __m512i two = _mm512_ternarylogic_epi32(_mm512_srli_epi16(codes, o % 4 * 4 + 4), four, _mm512_set1_epi16(16), 0xea);   // (a & b) | c
    to[0] = (__m512bh)_mm512_permutexvar_epi16(one, table);
    to[1] = (__m512bh)_mm512_permutexvar_epi16(two, table);
}

constexpr int64_t CHUNK = 24;   // `Codes` at most that are read for all outputs before the next ones: they stay in the first cache

template <int64_t R>
inline void block(const Bits* x, const Codes* w, Bits* y, const float* bias, int64_t K, int64_t stride, int64_t outputs)
{
    const int64_t count = K / INPUTS, chunks = (count + CHUNK - 1) / CHUNK, chunk = (count + chunks - 1) / chunks;
    Floats parts[R][OUTPUTS];   // of sums, which are added up at the end
    for (int64_t start = 0; start < count; start += chunk)
        for (int64_t o = 0; o < OUTPUTS; o += 2) {
            __m512 s[R][2] = {};
            if (start)
                UNROLL for (int64_t r = 0; r < R; ++r) { s[r][0] = (__m512)parts[r][o]; s[r][1] = (__m512)parts[r][o + 1]; }
            for (int64_t k = start; k < std::min(start + chunk, count); ++k) {
                Pairs weights[2];
                decode(w[k], o, weights);
                __builtin_prefetch((const char*)(w + k + chunk) + o / 2 * 64);
                UNROLL for (int64_t r = 0; r < R; ++r) {
                    const Pairs in = (Pairs)_mm512_loadu_si512(x + r * K + k * INPUTS);
                    s[r][0] = _mm512_dpbf16_ps(s[r][0], in, weights[0]);
                    s[r][1] = _mm512_dpbf16_ps(s[r][1], in, weights[1]);
                }
            }
            UNROLL for (int64_t r = 0; r < R; ++r) { parts[r][o] = (Floats)s[r][0]; parts[r][o + 1] = (Floats)s[r][1]; }
        }
    for (int64_t r = 0; r < R; ++r) {
        float sums[OUTPUTS];
        for (int64_t o = 0; o < OUTPUTS; o += LANES) store(sums + o, sums_of(parts[r] + o));
        finish(sums, y + r * stride, bias, outputs);
    }
}

struct Range { double low, high; };

// The numbers that are rounded to x; halfway between two it is the even one.
inline Range rounded_to(Bits x)
{
    const Bits size = x & 0x7fff;
    if (!size) return {0, 0};
    const double in = size & 1 ? 1e-9 : 0, middle = from_bits(size);
    const double near = (middle + from_bits(Bits(size - 1))) / 2 * (1 + in), far = (middle + from_bits(Bits(size + 1))) / 2 * (1 - in);
    return x == size ? Range{near, far} : Range{-far, -near};
}

// The number of fewest bits in the range.
inline double simplest(Range of)
{
    if (of.low <= 0 && of.high >= 0) return 0;
    if (of.high < 0) return -simplest({-of.high, -of.low});
    const auto low = std::bit_cast<uint64_t>(of.low) - 1, high = std::bit_cast<uint64_t>(of.high);
    const int further = 63 - std::countl_zero(low ^ high);   // what is cleared of the larger one lies in the range
    return std::bit_cast<double>(high >> further << further);
}

// Scale and offset of which codes are numbers in these ranges; false if there are none. Codes that are not in use have all numbers.
inline bool fit(const double* lower, const double* upper, float& scale, float& offset)
{
    Range of{0, 1e300};
    for (int64_t first = 0; first < 16; first += LANES / 2) {
        Doubles low = {}, high = low + 1e300;
        UNROLL for (int64_t gap = 1; gap < 16; ++gap) {   // arrays of 32: behind 16 codes as many that are not in use
            const Doubles least = (load<Doubles>(lower + first + gap) - load<Doubles>(upper + first)) * (1.0 / gap);
            const Doubles most = (load<Doubles>(upper + first + gap) - load<Doubles>(lower + first)) * (1.0 / gap);
            low = least > low ? least : low;
            high = most < high ? most : high;
        }
        for (int64_t i = 0; i < LANES / 2; ++i) of = {std::max(of.low, low[i]), std::min(of.high, high[i])};
    }
    if (of.low > of.high) return false;
    const double exact = simplest(of);
    of = {-1e300, 1e300};
    for (int64_t code = 0; code < 16; ++code)
        of = {std::max(of.low, lower[code] - double(code) * exact), std::min(of.high, upper[code] - double(code) * exact)};
    scale = float(exact);
    offset = float(simplest(of));
    return of.low <= of.high && float(15 * exact) == 15 * exact;   // so are the products with all codes
}

// Finds scale, offset and codes of INPUTS numbers; false if they are not of 4 bits. `decode` makes the same numbers of them.
inline bool encode(const Bits* from, float& scale, float& offset, uint8_t* codes)
{
    float v[INPUTS];
    for (int64_t i = 0; i < INPUTS; ++i) {
        v[i] = from_bits(from[i]);
        if (v[i] != 0 && !std::isnormal(v[i])) return false;
    }
    const float least = *std::min_element(v, v + INPUTS), most = *std::max_element(v, v + INPUTS);
    for (int64_t steps = 15; steps > 0; --steps) {
        const float per_unit = most > least ? float(steps) / (most - least) : 0;
        double lower[32], upper[32];
        float number[16];
        uint32_t used = 0;
        bool same = true;
        std::fill(lower, lower + 32, -1e300);
        std::fill(upper, upper + 32, 1e300);
        for (int64_t i = 0; same && i < INPUTS; ++i) {
            const uint8_t code = codes[i] = uint8_t(std::min(15.5f, (v[i] - least) * per_unit + 0.5f));
            same = !(used >> code & 1) || number[code] == v[i];
            if (used >> code & 1) continue;
            const Range range = rounded_to(from[i]);
            lower[code] = range.low;
            upper[code] = range.high;
            number[code] = v[i];
            used |= 1u << code;
        }
        if (!same || !fit(lower, upper, scale, offset)) continue;
        for (int64_t code = 0; code < 16; ++code) {
            const float made = float(code) * scale + offset;
            same = same && (!(used >> code & 1) || (number[code] == 0 ? made : from_bits(rounded(made))) == number[code]);
        }
        if (same) return true;
    }
    return false;
}

// The weight [N, K] as codes; empty if it is not of 4 bits.
Tensor encoded(const Tensor& weight)
{
    const int64_t N = weight.size(0), K = weight.size(1), blocks = (N + OUTPUTS - 1) / OUTPUTS;
    float scale, offset;
    uint8_t some[INPUTS];
    if (weight.scalar_type() != at::kBFloat16 || K % INPUTS
        || !encode((const Bits*)weight[0].slice(0, 0, INPUTS).contiguous().const_data_ptr(), scale, offset, some))
        return at::empty({0}, at::kByte);   // as most are, at once
    const Tensor dense = weight.contiguous(), found = at::zeros({blocks * (K / INPUTS) * int64_t(sizeof(Codes))}, at::kByte);
    std::atomic<bool> fits = true;
    at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
        for (int64_t n = first * OUTPUTS; n < std::min(last * OUTPUTS, N); ++n)
            for (int64_t k = 0; fits && k < K; k += INPUTS) {
                Codes& to = ((Codes*)found.data_ptr())[n / OUTPUTS * (K / INPUTS) + k / INPUTS];
                const int64_t o = n % OUTPUTS;
                uint8_t codes[INPUTS];
                if (!encode((const Bits*)dense.const_data_ptr() + n * K + k, to.scales[o], to.offsets[o], codes)) {
                    fits = false;
                    break;
                }
                for (int64_t i = 0; i < INPUTS; ++i) to.codes[o / 4][i] |= uint16_t(codes[i] << o % 4 * 4);
            }
    });
    return fits ? found : found.new_empty({0});
}
#else
Tensor encoded(const Tensor&) { return at::empty({0}, at::kByte); }
#endif
