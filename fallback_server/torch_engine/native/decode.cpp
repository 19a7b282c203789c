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

// `groups` query heads share the keys and values of one kv head. Positions from `first` to `length` - 1 are seen.
template <typename T>
void one(const T* q, int64_t q_head, const T* keys, const T* values, const int64_t* pages, int64_t first, int64_t length,
         int64_t page_size, int64_t row, int64_t dim, int64_t value_row, int64_t value_dim, int64_t groups, float scale, T* out) {
    thread_local std::vector<float> memory;
    const int64_t count = length - first;
    memory.resize(static_cast<size_t>(groups * (count + dim + value_dim)));
    float* scores = memory.data();
    float* query = scores + groups * count;
    float* sums = query + groups * dim;
    for (int64_t g = 0; g < groups; ++g)
        for (int64_t d = 0; d < dim; ++d) query[g * dim + d] = load(q[g * q_head + d]) * scale;
    for (int64_t position = first; position < length; ++position) {
        const T* key = keys + (pages[position / page_size] * page_size + position % page_size) * row;
        for (int64_t g = 0; g < groups; ++g) {
            const float* of = query + g * dim;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < dim; ++d) sum += of[d] * load(key[d]);
            scores[g * count + position - first] = sum;
        }
    }
    for (int64_t g = 0; g < groups; ++g) {
        float* part = scores + g * count;
        float most = -std::numeric_limits<float>::infinity(), total = 0.0f, sound = 0.0f;
#pragma omp simd reduction(max : most) reduction(+ : sound)
        for (int64_t i = 0; i < count; ++i) {
            most = std::max(most, part[i]);
            sound += part[i] * 0.0f;  // NaN if any score is not a finite number; what follows would hide that
        }
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < count; ++i) total += part[i] = fast_exp(part[i] - most);
        const float inverse = 1.0f / total + sound;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) part[i] *= inverse;
    }
    std::fill(sums, sums + groups * value_dim, 0.0f);
    for (int64_t position = first; position < length; ++position) {
        const T* value = values + (pages[position / page_size] * page_size + position % page_size) * value_row;
        for (int64_t g = 0; g < groups; ++g) {
            const float weight = scores[g * count + position - first];
            float* sum = sums + g * value_dim;
#pragma omp simd
            for (int64_t d = 0; d < value_dim; ++d) sum[d] += weight * load(value[d]);
        }
    }
    for (int64_t i = 0; i < groups * value_dim; ++i) store(out + i, sums[i]);
}

struct Shape {
    int64_t rows, heads, kv_heads, dim, value_dim, page_size, width, window, q_row, q_head, threads;
};

// q [rows, heads, dim] with strides q_row and q_head; keys [pages, page_size, kv_heads, dim], values likewise; table
// [rows, width] of pages; lengths [rows]; out [rows, heads, value_dim]. window 0: none.
template <typename T>
void all(const T* q, const T* keys, const T* values, const int64_t* table, const int64_t* lengths, T* out, const Shape& s,
         float scale) {
    const int64_t groups = s.heads / s.kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(s.threads)) if (s.threads > 1)
    for (int64_t item = 0; item < s.rows * s.kv_heads; ++item) {
        const int64_t r = item / s.kv_heads, h = item % s.kv_heads, length = lengths[r];
        const int64_t first = s.window > 0 ? std::max<int64_t>(0, length - s.window) : 0;
        one<T>(q + r * s.q_row + h * groups * s.q_head, s.q_head, keys + h * s.dim, values + h * s.value_dim, table + r * s.width,
               first, length, s.page_size, s.kv_heads * s.dim, s.dim, s.kv_heads * s.value_dim, s.value_dim, groups, scale,
               out + (r * s.heads + h * groups) * s.value_dim);
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
