// Attention of decode rows over the paged KV cache on a CPU: one row a sequence, read where its pages lie.
// PyTorch has no such kernel for CPUs; gathering the pages for its dense attention moves every key and value three times.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float load(float value) { return value; }

inline float load(bf16 value) {
    uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
    float out;
    std::memcpy(&out, &wide, sizeof out);
    return out;
}

inline void store(float* to, float value) { *to = value; }

inline void store(bf16* to, float value) {  // rounds to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    to->bits = static_cast<uint16_t>(value != value ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// exp for x <= 0, to 2 ulp, in a form that compilers vectorize: 2^n by the exponent bits, 2^f by its Taylor polynomial.
inline float fast_exp(float x) {
    float scaled = std::max(x, -87.0f) * 1.44269504f;
    float whole = static_cast<float>(static_cast<int32_t>(scaled - 0.5f));
    float f = (scaled - whole) * 0.693147181f;
    float p = 1.0f + f * (1.0f + f * (0.5f + f * (1.0f / 6 + f * (1.0f / 24 + f * (1.0f / 120 + f * (1.0f / 720))))));
    uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

struct Shape {
    int64_t rows, heads, kv_heads, dim, value_dim, page_size, width, window, q_row, q_head, threads;
};

// One sequence, kv heads `head` … `head + span` - 1, each shared by `groups` query heads, which lie one after the other.
// Positions from `first` to `length` - 1 are seen. DIM: the dimension of keys and values where the compiler may know it, else 0.
template <typename T, int DIM>
void one(const Shape& s, const T* q, const T* keys, const T* values, const int64_t* pages, int64_t head, int64_t span,
         int64_t first, int64_t length, float scale, T* out) {
    thread_local std::vector<float> memory;
    const int64_t dim = DIM ? DIM : s.dim, value_dim = DIM ? DIM : s.value_dim;
    const int64_t groups = s.heads / s.kv_heads, queries = span * groups, count = length - first;
    memory.resize(static_cast<size_t>(queries * (count + dim + value_dim)));
    float* scores = memory.data();
    float* query = scores + queries * count;
    float* sums = query + queries * dim;
    for (int64_t i = 0; i < queries; ++i)
        for (int64_t d = 0; d < dim; ++d) query[i * dim + d] = load(q[i * s.q_head + d]) * scale;
    // Page by page, so that a page is in the first cache while all query heads use it.
    for (int64_t start = first; start < length;) {
        const int64_t stop = std::min(length, (start / s.page_size + 1) * s.page_size);
        const T* page = keys + ((pages[start / s.page_size] * s.page_size + start % s.page_size) * s.kv_heads + head) * dim;
        for (int64_t i = 0; i < queries; ++i) {
            const float* of = query + i * dim;
            const T* key = page + i / groups * dim;
            for (int64_t position = start; position < stop; ++position, key += s.kv_heads * dim) {
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (int64_t d = 0; d < dim; ++d) sum += of[d] * load(key[d]);
                scores[i * count + position - first] = sum;
            }
        }
        start = stop;
    }
    for (int64_t i = 0; i < queries; ++i) {
        float* part = scores + i * count;
        float most = -std::numeric_limits<float>::infinity(), total = 0.0f, sound = 0.0f;
#pragma omp simd reduction(max : most) reduction(+ : sound)
        for (int64_t p = 0; p < count; ++p) {
            most = std::max(most, part[p]);
            sound += part[p] * 0.0f;  // NaN if any score is not a finite number; what follows would hide that
        }
#pragma omp simd reduction(+ : total)
        for (int64_t p = 0; p < count; ++p) total += part[p] = fast_exp(part[p] - most);
        const float inverse = 1.0f / total + sound;
#pragma omp simd
        for (int64_t p = 0; p < count; ++p) part[p] *= inverse;
    }
    std::fill(sums, sums + queries * value_dim, 0.0f);
    for (int64_t start = first; start < length;) {
        const int64_t stop = std::min(length, (start / s.page_size + 1) * s.page_size);
        const T* page = values + ((pages[start / s.page_size] * s.page_size + start % s.page_size) * s.kv_heads + head) * value_dim;
        for (int64_t i = 0; i < queries; ++i) {
            const float* weight = scores + i * count - first;
            const T* value = page + i / groups * value_dim;
            float* sum = sums + i * value_dim;
            if constexpr (DIM != 0) {
                float local[DIM];  // stays in registers over the page
                std::copy(sum, sum + DIM, local);
                for (int64_t position = start; position < stop; ++position, value += s.kv_heads * value_dim) {
#pragma omp simd
                    for (int64_t d = 0; d < DIM; ++d) local[d] += weight[position] * load(value[d]);
                }
                std::copy(local, local + DIM, sum);
            } else {
                for (int64_t position = start; position < stop; ++position, value += s.kv_heads * value_dim) {
#pragma omp simd
                    for (int64_t d = 0; d < value_dim; ++d) sum[d] += weight[position] * load(value[d]);
                }
            }
        }
        start = stop;
    }
    for (int64_t i = 0; i < queries * value_dim; ++i) store(out + i, sums[i]);
}

// q [rows, heads, dim] with strides q_row and q_head; keys [pages, page_size, kv_heads, dim], values likewise; table
// [rows, width] of pages; lengths [rows]; out [rows, heads, value_dim]. window 0: none.
template <typename T>
void all(const T* q, const T* keys, const T* values, const int64_t* table, const int64_t* lengths, T* out, const Shape& s,
         float scale) {
    const int64_t groups = s.heads / s.kv_heads;
    // The heads of a token lie beside each other, so one thread reads them all, unless that leaves threads without work.
    const int64_t span = s.rows >= 2 * s.threads ? s.kv_heads : 1, parts = s.kv_heads / span;
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(s.threads)) if (s.threads > 1)
    for (int64_t item = 0; item < s.rows * parts; ++item) {
        const int64_t r = item / parts, head = item % parts * span, length = lengths[r];
        const int64_t first = s.window > 0 ? std::max<int64_t>(0, length - s.window) : 0;
        const auto kernel = s.dim != s.value_dim ? one<T, 0> : s.dim == 64 ? one<T, 64> : s.dim == 128 ? one<T, 128> : one<T, 0>;
        kernel(s, q + r * s.q_row + head * groups * s.q_head, keys, values, table + r * s.width, head, span, first, length, scale,
               out + (r * s.heads + head * groups) * s.value_dim);
    }
}

}  // namespace

extern "C" {

void nearfar_decode_f32(const float* q, const float* keys, const float* values, const int64_t* table, const int64_t* lengths,
                        float* out, const Shape* shape, float scale) {
    all<float>(q, keys, values, table, lengths, out, *shape, scale);
}

void nearfar_decode_bf16(const bf16* q, const bf16* keys, const bf16* values, const int64_t* table, const int64_t* lengths,
                         bf16* out, const Shape* shape, float scale) {
    all<bf16>(q, keys, values, table, lengths, out, *shape, scale);
}
}
