// Weights that were dequantized from GGUF's blocks: scale * code + offset for every output and 32 inputs, or scale * code for 16 of them, in fp32
// or then rounded to bf16. So packed they take 0.75 bytes each (codes of 4 bits: Q4_0, Q4_1, Q4_K) or 1.25 (8 bits: Q5_0 to Q8_0, Q3_K, Q6_K),
// and products make the same numbers of them. Scales, offsets and codes are found from the numbers alone, whatever file they are from. Part of
// kernels.cpp.

constexpr int64_t INPUTS = 32;
struct Four {
    float scales[OUTPUTS], offsets[OUTPUTS];
    uint8_t codes[OUTPUTS * INPUTS / 2];
};
template <bool HALVES>   // whether each half of the inputs has a scale, and none an offset
struct Eight {
    float scales[OUTPUTS], others[OUTPUTS];   // the latter: offsets, or the scales of the other half
    uint8_t codes[OUTPUTS * INPUTS];
};
enum Kind : int64_t { DENSE, FOUR, EIGHT, HALVES, ROUNDED };   // DENSE: not of codes; ROUNDED is added where fp32 has numbers of bf16

// A packed weight of codes begins with a number for each block of outputs: where it lies, and of which kind it is. Calls f with its codes.
template <typename F>
inline void with_codes(const char* weight, int64_t block, F f)
{
    const int64_t entry = ((const int64_t*)weight)[block];
    const char* from = weight + (entry >> 3);
    const bool rounded = entry & ROUNDED;
    if ((entry & 3) == FOUR) f((const Four*)from, rounded);
    else if ((entry & 3) == EIGHT) f((const Eight<false>*)from, rounded);
    else f((const Eight<true>*)from, rounded);
}

// Numbers in fp32. Codes of an input lie side by side: of 8 bits in the order of outputs, of 4 bits output o's below that of o + OUTPUTS / 2.

template <bool ROUND>
inline Floats number(Integers code, Floats scale, Floats offset)
{
    const auto made = (Words)(__builtin_convertvector(code, Floats) * scale + offset);
    return (Floats)(ROUND ? (made + 0x7fff + (made >> 16 & 1)) & 0xffff0000u : made);
}

template <bool ROUND>
inline void unpack(const Four& from, float* to)
{
    for (int64_t o = 0; o < OUTPUTS / 2; o += LANES) {
        const int64_t other = o + OUTPUTS / 2;
        const auto scale = load<Floats>(from.scales + o), scale2 = load<Floats>(from.scales + other);
        const auto offset = load<Floats>(from.offsets + o), offset2 = load<Floats>(from.offsets + other);
        for (int64_t k = 0; k < INPUTS; ++k) {
            const Integers two = widened(from.codes + k * OUTPUTS / 2 + o);
            store(to + k * OUTPUTS + o, number<ROUND>(two & 15, scale, offset));
            store(to + k * OUTPUTS + other, number<ROUND>(two >> 4, scale2, offset2));
        }
    }
}

template <bool ROUND, bool HALVES>
inline void unpack(const Eight<HALVES>& from, float* to)
{
    for (int64_t o = 0; o < OUTPUTS; o += LANES)
        for (int64_t half = 0; half < 2; ++half) {
            const auto scale = load<Floats>((HALVES && half ? from.others : from.scales) + o);
            const auto offset = HALVES ? Floats{} : load<Floats>(from.others + o);
            for (int64_t k = half * INPUTS / 2; k < (half + 1) * INPUTS / 2; ++k)
                store(to + k * OUTPUTS + o, number<ROUND>(widened(from.codes + k * OUTPUTS + o) - (HALVES ? 128 : 0), scale, offset));
        }
}

#if defined(__AVX512BF16__)
// Pairs of numbers in bf16. Codes of 4 bits: an input's of four outputs lie in 16 bits, the first one's lowest. Of 8 bits: four inputs of a half
// and an output lie side by side, and these in the 16 bytes from which instructions take them.

using Pairs = __m512bh;   // INPUTS numbers in bf16

// Weights of outputs o and o + 1: each has 16 different ones, which the codes select.
inline void decode(const Four& from, int64_t o, Pairs* to)
{
    const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 first = _mm512_fmadd_ps(all, _mm512_set1_ps(from.scales[o]), _mm512_set1_ps(from.offsets[o]));
    const __m512 second = _mm512_fmadd_ps(all, _mm512_set1_ps(from.scales[o + 1]), _mm512_set1_ps(from.offsets[o + 1]));
    const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(second, first), four = _mm512_set1_epi16(15);
    const __m512i codes = _mm512_loadu_si512(from.codes + o / 4 * 64);
    const __m512i one = _mm512_and_si512(_mm512_srli_epi16(codes, o % 4 * 4), four);
    const __m512i two = _mm512_ternarylogic_epi32(_mm512_srli_epi16(codes, o % 4 * 4 + 4), four, _mm512_set1_epi16(16), 0xea);   // (a & b) | c
    to[0] = (__m512bh)_mm512_permutexvar_epi16(one, table);
    to[1] = (__m512bh)_mm512_permutexvar_epi16(two, table);
}

// The same of 8 bits: a code becomes a byte of the number 2^15 + code.
template <bool HALVES>
inline void decode(const Eight<HALVES>& from, int64_t o, Pairs* to)
{
    const __m512i codes = _mm512_loadu_si512(from.codes + o / 2 * 64), base = _mm512_set1_epi32(0x47000000);
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 1 << 8, 2 << 8, 3 << 8));
    const auto numbers = [&](int part) {
        const __m512i found = _mm512_mask_shuffle_epi8(base, 0x2222222222222222, codes, _mm512_add_epi32(bytes, _mm512_set1_epi32(part * 4 << 8)));
        return _mm512_sub_ps((__m512)found, _mm512_set1_ps(HALVES ? 32768 + 128 : 32768));
    };
    UNROLL for (int i = 0; i < 2; ++i) {
        const __m512 scale = _mm512_set1_ps(from.scales[o + i]), other = _mm512_set1_ps(from.others[o + i]);
        const __m512 left = numbers(2 * i), right = numbers(2 * i + 1);
        if constexpr (HALVES) to[i] = _mm512_cvtne2ps_pbh(_mm512_mul_ps(right, other), _mm512_mul_ps(left, scale));
        else to[i] = _mm512_cvtne2ps_pbh(_mm512_fmadd_ps(right, scale, other), _mm512_fmadd_ps(left, scale, other));
    }
}

// Adds the products of R rows with groups of inputs to vectors of sums, [R, OUTPUTS]; weights(k, o, to): those of outputs o and o + 1.
template <int64_t R, typename F>
inline void add_groups(const Bits* x, Floats* sums, int64_t K, int64_t start, int64_t end, F weights)
{
    for (int64_t o = 0; o < OUTPUTS; o += 2) {
        __m512 s[R][2] = {};
        if (start)
            UNROLL for (int64_t r = 0; r < R; ++r) { s[r][0] = (__m512)sums[r * OUTPUTS + o]; s[r][1] = (__m512)sums[r * OUTPUTS + o + 1]; }
        for (int64_t k = start; k < end; ++k) {
            Pairs two[2];
            weights(k, o, two);
            UNROLL for (int64_t r = 0; r < R; ++r) {
                const Pairs in = (Pairs)_mm512_loadu_si512(x + r * K + k * INPUTS);
                s[r][0] = _mm512_dpbf16_ps(s[r][0], in, two[0]);
                s[r][1] = _mm512_dpbf16_ps(s[r][1], in, two[1]);
            }
        }
        UNROLL for (int64_t r = 0; r < R; ++r) { sums[r * OUTPUTS + o] = (Floats)s[r][0]; sums[r * OUTPUTS + o + 1] = (Floats)s[r][1]; }
    }
}

inline void finish_groups(const Floats* sums, Bits* y, const float* bias, int64_t M, int64_t stride, int64_t outputs)
{
    for (int64_t r = 0; r < M; ++r) {
        float row[OUTPUTS];
        for (int64_t o = 0; o < OUTPUTS; o += LANES) store(row + o, sums_of(sums + r * OUTPUTS + o));
        finish(row, y + r * stride, bias, outputs);
    }
}

template <typename C> constexpr int64_t CHUNK = 24 * sizeof(Four) / sizeof(C);   // read for all outputs before the next: they stay in the first cache

// Fetches the lines of codes that are outputs o and o + 1's, by number.
template <typename C>
inline void prefetch(const C* codes, int64_t o)
{
    UNROLL for (int64_t line = o / 2; line < int64_t(sizeof(C) / 64); line += OUTPUTS / 2) __builtin_prefetch((const char*)codes + line * 64);
}

template <int64_t R, typename C>
inline void block(const Bits* x, const C* w, Bits* y, const float* bias, int64_t K, int64_t stride, int64_t outputs)
{
    const int64_t count = K / INPUTS, chunks = (count + CHUNK<C> - 1) / CHUNK<C>, chunk = (count + chunks - 1) / chunks;
    Floats sums[R * OUTPUTS];
    for (int64_t start = 0; start < count; start += chunk)
        add_groups<R>(x, sums, K, start, std::min(start + chunk, count), [&](int64_t k, int64_t o, Pairs* to) {
            decode(w[k], o, to);
            prefetch(w + k + chunk, o);
        });
    finish_groups(sums, y, bias, R, stride, outputs);
}

// The same of any number of rows: weights are made once for all.
template <typename C>
inline void block_of_many(const Bits* x, const C* w, Bits* y, const float* bias, int64_t M, int64_t K, int64_t stride, int64_t outputs)
{
    constexpr int64_t chunk = 32;
    alignas(64) Pairs made[OUTPUTS / 2][chunk][2];
    static thread_local std::vector<Floats> sums;
    sums.resize(M * OUTPUTS);
    for (int64_t start = 0; start < K / INPUTS; start += chunk) {
        const int64_t end = std::min(start + chunk, K / INPUTS);
        for (int64_t k = start; k < end; ++k)
            for (int64_t o = 0; o < OUTPUTS; o += 2) {
                decode(w[k], o, made[o / 2][k - start]);
                prefetch(w + k + chunk, o);
            }
        for (int64_t m = 0; m < M; m += ROWS)
            with_rows<ROWS>(std::min(M - m, ROWS), [&](auto R) {
                add_groups<R>(x + m * K, sums.data() + m * OUTPUTS, K, start, end, [&](int64_t k, int64_t o, Pairs* to) {
                    to[0] = made[o / 2][k - start][0];
                    to[1] = made[o / 2][k - start][1];
                });
            });
    }
    finish_groups(sums.data(), y, bias, M, stride, outputs);
}

constexpr bool IN_PAIRS = true;   // products in bf16
#else
constexpr bool IN_PAIRS = false;
#endif

// Where the code of input k of output o stands: the number of 4 or 8 bits in the order above.
template <bool PAIRS> inline int64_t place(const Four&, int64_t o, int64_t k)
{
    return PAIRS ? o / 4 * 128 + k * 4 + o % 4 : k * OUTPUTS + o % (OUTPUTS / 2) * 2 + o / (OUTPUTS / 2);
}
template <bool PAIRS, bool HALVES> inline int64_t place(const Eight<HALVES>&, int64_t o, int64_t k)
{
    return PAIRS ? o / 2 * 64 + k % 16 / 4 * 16 + o % 2 * 8 + k / 16 * 4 + k % 4 : k * OUTPUTS + o;
}

struct Range { double low, high; };

// The numbers that are rounded to x in bf16 (ROUND) or fp32; halfway between two it is the even one.
template <bool ROUND>
inline Range rounded_to(float x)
{
    constexpr uint32_t step = ROUND ? 1 << 16 : 1;
    const auto size = std::bit_cast<uint32_t>(x) & 0x7fffffff;
    if (!size) return {0, 0};
    const double in = size & step ? 1e-9 : 0, middle = std::bit_cast<float>(size);
    const double near = (middle + std::bit_cast<float>(size - step)) / 2 * (1 + in);
    const double far = (middle + std::bit_cast<float>(size + step)) / 2 * (1 - in);
    return x > 0 ? Range{near, far} : Range{-far, -near};
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
template <int64_t LEVELS>
inline bool fit(const double* lower, const double* upper, float& scale, float& offset)
{
    Range of{0, 1e300};
    for (int64_t first = 0; first < LEVELS; first += LANES / 2) {
        Doubles low = {}, high = low + 1e300;
        UNROLL for (int64_t gap = 1; gap < LEVELS; ++gap) {   // behind the codes as many stand that are not in use
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
    for (int64_t code = 0; code < LEVELS; ++code)
        of = {std::max(of.low, lower[code] - double(code) * exact), std::min(of.high, upper[code] - double(code) * exact)};
    scale = float(exact);
    offset = float(simplest(of));
    return of.low <= of.high && float((LEVELS - 1) * exact) == (LEVELS - 1) * exact;   // so are the products with all codes
}

template <bool ROUND>
inline bool made(float scale, float offset, uint8_t code, float number)
{
    const float found = std::fma(float(code), scale, offset);
    return (ROUND && number != 0 ? from_bits(rounded(found)) : found) == number;
}

// Finds scale, offset and codes of INPUTS numbers; false if they are not of so many levels. `decode` makes the same numbers of them.
template <bool ROUND, int64_t LEVELS>
inline bool encode(const float* v, float& scale, float& offset, uint8_t* codes)
{
    const float least = *std::min_element(v, v + INPUTS), most = *std::max_element(v, v + INPUTS);
    for (int64_t steps = LEVELS - 1; steps > 0; --steps) {
        const float per_unit = most > least ? float(steps) / (most - least) : 0;
        double lower[2 * LEVELS], upper[2 * LEVELS];
        float number[LEVELS];
        uint32_t used = 0;
        bool same = true;
        std::fill(lower, lower + 2 * LEVELS, -1e300);
        std::fill(upper, upper + 2 * LEVELS, 1e300);
        for (int64_t i = 0; same && i < INPUTS; ++i) {
            const uint8_t code = codes[i] = uint8_t(std::min(LEVELS - 0.5f, (v[i] - least) * per_unit + 0.5f));
            same = !(used >> code & 1) || number[code] == v[i];
            if (used >> code & 1) continue;
            const Range range = rounded_to<ROUND>(v[i]);
            lower[code] = range.low;
            upper[code] = range.high;
            number[code] = v[i];
            used |= 1u << code;
        }
        if (!same || !fit<LEVELS>(lower, upper, scale, offset)) continue;
        for (int64_t i = 0; i < INPUTS; ++i) same = same && made<ROUND>(scale, offset, codes[i], v[i]);
        if (same) return true;
    }
    return false;
}

// Finds the codes, 128 for 0, of numbers that are multiples of a scale in a range, which becomes narrower with each number. In 8 bits two
// codes may be right for a number until the range is narrow.
template <bool ROUND>
inline bool multiples(const float* v, int64_t count, int64_t most, Range scales, uint8_t* codes, float& scale)
{
    if (!count) { scale = float(simplest(scales)); return true; }
    const Range one = rounded_to<ROUND>(std::abs(*v));
    const auto last = std::min(most, int64_t(one.high / scales.low));
    for (auto code = int64_t(std::ceil(one.low / scales.high)); code <= last; ++code) {
        const double of = std::max<double>(code, 1e-300);   // 0 is a multiple of all scales
        const Range both{std::max(scales.low, one.low / of), code ? std::min(scales.high, one.high / of) : scales.high};
        if (both.low > both.high || !multiples<ROUND>(v + 1, count - 1, most, both, codes + 1, scale)) continue;
        *codes = uint8_t(128 + (*v < 0 ? -code : code));
        if (made<ROUND>(scale, -128 * scale, *codes, *v)) return true;
    }
    return false;
}

constexpr auto INVERSES = [] {
    std::array<double, 129> of{};
    for (int64_t i = 1; i < 129; ++i) of[i] = 1.0 / double(i);
    return of;
}();

// The same, much sooner, where every code is that of the multiple next to its number with the scale in the middle.
template <bool ROUND>
inline bool nearest_multiples(const float* v, int64_t count, Range scales, uint8_t* codes, float& scale)
{
    const double per_unit = 2 / (scales.low + scales.high);
    for (int64_t i = 0; i < count; ++i) {
        const Range one = rounded_to<ROUND>(std::abs(v[i]));
        const auto code = int64_t(std::abs(v[i]) * per_unit + 0.5);
        if (code) scales = {std::max(scales.low, one.low * INVERSES[code]), std::min(scales.high, one.high * INVERSES[code])};
        if (scales.low > scales.high || (!code && v[i] != 0)) return false;
        codes[i] = uint8_t(128 + (v[i] < 0 ? -code : code));
    }
    scale = float(simplest(scales));
    return std::equal(v, v + count, codes, [&](float number, uint8_t code) { return made<ROUND>(scale, -128 * scale, code, number); });
}

// The same with any scale; `most`: the code of the largest number, as far as is known. Codes close to it are tried first.
template <bool ROUND>
inline bool scaled(const float* v, int64_t count, float& scale, uint8_t* codes, int64_t& most)
{
    const auto smaller = [](float a, float b) { return std::abs(a) < std::abs(b); };
    const Range largest = rounded_to<ROUND>(std::abs(*std::max_element(v, v + count, smaller)));
    scale = 0;
    std::fill(codes, codes + count, 128);
    if (largest.high == 0) return true;
    for (int64_t step = 0; step < 254; ++step) {
        const int64_t of = step % 2 ? most + (step + 1) / 2 : most - step / 2;
        if (of < 1 || of > 127) continue;
        const Range scales{largest.low / double(of), largest.high / double(of)};
        if (!nearest_multiples<ROUND>(v, count, scales, codes, scale) && !multiples<ROUND>(v, count, of, scales, codes, scale)) continue;
        most = of;
        return true;
    }
    return false;
}

// Finds a group's codes, and the scales of output o; false if they are not of this kind.
template <bool ROUND>
inline bool encode(const float* v, int64_t o, Four& to, uint8_t* codes, int64_t&)
{
    return encode<ROUND, 16>(v, to.scales[o], to.offsets[o], codes);
}

template <bool ROUND, bool HALVES>
inline bool encode(const float* v, int64_t o, Eight<HALVES>& to, uint8_t* codes, int64_t& most)
{
    float &scale = to.scales[o], &other = to.others[o];
    constexpr int64_t half = INPUTS / 2;
    if constexpr (HALVES) return scaled<ROUND>(v, half, scale, codes, most) && scaled<ROUND>(v + half, half, other, codes + half, most);
    if (!scaled<ROUND>(v, INPUTS, scale, codes, most)) return encode<ROUND, 32>(v, scale, other, codes);
    other = -128 * scale;
    return true;
}

// The weight [N, K] as codes of a kind, [blocks, bytes]; empty if it is not of that kind.
template <typename C, bool ROUND, bool PAIRS, typename T>
Tensor encoded_as(const T* weight, int64_t N, int64_t K)
{
    const int64_t blocks = (N + OUTPUTS - 1) / OUTPUTS, groups = K / INPUTS;
    const Tensor found = at::zeros({blocks, groups * int64_t(sizeof(C))}, at::kByte);
    std::atomic<bool> fits = true;
    const auto rows = [&](int64_t n, int64_t last, int64_t until) {
        int64_t most = 127;
        uint8_t codes[INPUTS];
        for (; n < last; ++n)
            for (int64_t k = 0; fits && k < until; ++k) {
                float v[INPUTS];
                to_floats(v, weight + n * K + k * INPUTS, INPUTS);
                C& to = ((C*)found.data_ptr())[n / OUTPUTS * groups + k];
                const bool whole = std::all_of(v, v + INPUTS, [](float x) { return x == 0 || std::isnormal(x); });
                if (!whole || !encode<ROUND>(v, n % OUTPUTS, to, codes, most)) fits = false;
                for (int64_t i = 0; i < INPUTS; ++i) {
                    const int64_t at = place<PAIRS>(to, n % OUTPUTS, i);
                    if constexpr (std::is_same_v<C, Four>) to.codes[at / 2] |= uint8_t(codes[i] << at % 2 * 4);
                    else to.codes[at] = codes[i];
                }
            }
    };
    rows(0, 1, 1);   // most weights are not of codes, which shows at once
    if (fits) {
        found.zero_();
        at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) { rows(first * OUTPUTS, std::min(last * OUTPUTS, N), groups); });
    }
    return fits ? found : found.new_empty({0});
}

template <bool ROUND, bool PAIRS, typename T>
std::tuple<Tensor, int64_t> encoded_as_some(const T* weight, int64_t N, int64_t K)
{
    constexpr int64_t as = ROUND && !PAIRS ? ROUNDED : 0;
    Tensor found = encoded_as<Four, ROUND, PAIRS>(weight, N, K);
    if (found.numel()) return {found, FOUR + as};
    found = encoded_as<Eight<false>, ROUND, PAIRS>(weight, N, K);
    if (found.numel()) return {found, EIGHT + as};
    found = encoded_as<Eight<true>, ROUND, PAIRS>(weight, N, K);
    return {found, found.numel() ? HALVES + as : DENSE};
}

// The codes of a weight [N, K], [blocks, bytes], and their kind.
std::tuple<Tensor, int64_t> encoded(const Tensor& weight)
{
    const int64_t N = weight.size(0), K = weight.size(1);
    if (K % INPUTS) return {at::empty({0}, at::kByte), DENSE};
    const Tensor dense = weight.contiguous();
    if (dense.scalar_type() == at::kBFloat16) return encoded_as_some<true, IN_PAIRS>((const Bits*)dense.const_data_ptr(), N, K);
    const auto* numbers = dense.const_data_ptr<float>();
    const bool short_ = std::all_of(numbers, numbers + K, [](float x) { return !(std::bit_cast<uint32_t>(x) & 0xffff); });
    return short_ ? encoded_as_some<true, false>(numbers, N, K) : encoded_as_some<false, false>(numbers, N, K);
}
