// What spot checks of a run ask of its memory: hashes of bytes, products of a matrix with four vectors in float64, and elements by index.
//
// Blocks of 256 threads. Sums of integers by atomics are the same in any order; those of float64 are made in one order. Nothing here
// writes to what it reads.

#include <cstdint>

constexpr int THREADS = 256;
constexpr uint64_t TILE = 16384;  // bytes of a block of `hash`
constexpr int WARPS = THREADS / 32;
constexpr int PAIRS = TILE / 16 / THREADS;  // of words that a thread hashes

namespace {

// Element i of a matrix: bf16 (size 2) or float32 (size 4).
template <int SIZE>
__device__ __forceinline__ double element(const void* x, uint64_t i) {
    if constexpr (SIZE == 2) {
        return __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(x)[i]) << 16);
    } else {
        return static_cast<const float*>(x)[i];
    }
}

__device__ __forceinline__ double warp_sum(double x) {
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// out[m][0..3] = sum over n of x[m][n] v[n][0..3]; out[m][4] = sum over n of x[m][n]^2. A warp for each row.
template <int SIZE>
__device__ __forceinline__ void rows_of(const void* x, const double* v, double* out, uint64_t rows, uint64_t columns) {
    const uint64_t m = (static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x) / 32;
    if (m >= rows) return;
    double sums[5] = {};
    for (uint64_t n = threadIdx.x % 32; n < columns; n += 32) {
        const double a = element<SIZE>(x, m * columns + n);
        for (int k = 0; k < 4; ++k) sums[k] += a * v[4 * n + k];
        sums[4] += a * a;
    }
    for (int k = 0; k < 5; ++k) {
        const double total = warp_sum(sums[k]);
        if (threadIdx.x % 32 == 0) out[5 * m + k] = total;
    }
}

// out[n][0..3] = sum over m of x[m][n] v[m][0..3]; out[n][4] = sum over m of x[m][n]^2. A block takes 32 columns at a time, a warp every
// eighth row of them; the eight sums are added in the order of the warps, whatever the grid.
template <int SIZE>
__device__ __forceinline__ void columns_of(const void* x, const double* v, double* out, uint64_t rows, uint64_t columns) {
    __shared__ double parts[WARPS][5][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint64_t blocks = static_cast<uint64_t>(gridDim.x) * gridDim.y;
    for (uint64_t first = 32 * (blockIdx.y * static_cast<uint64_t>(gridDim.x) + blockIdx.x); first < columns; first += 32 * blocks) {
        const uint64_t n = first + lane;
        double sums[5] = {};
        if (n < columns) {
            for (uint64_t m = warp; m < rows; m += WARPS) {
                const double a = element<SIZE>(x, m * columns + n);
                for (int k = 0; k < 4; ++k) sums[k] += a * v[4 * m + k];
                sums[4] += a * a;
            }
        }
        for (int k = 0; k < 5; ++k) parts[warp][k][lane] = sums[k];
        __syncthreads();
        if (warp < 5 && n < columns) {
            double total = 0;
            for (int w = 0; w < WARPS; ++w) total += parts[w][warp][lane];
            out[5 * n + warp] = total;
        }
        __syncthreads();
    }
}

// Word i as a term of a hash.
__device__ __forceinline__ uint64_t mix(uint64_t word, uint64_t i) {
    const uint64_t odd = (i * 0x9e3779b97f4a7c15ull) | 1;
    word = (word + i) * odd;
    return (word ^ word >> 32) * odd;
}

}  // namespace

// slots[i / run] += mix(word i of x, i), modulo 2^64, for its 64-bit words, the last one filled up with zeros. `run`: words of a slot, a
// multiple of a block's. For one i `mix` is a bijection: one word that changes shows for certain. What is
// folded into the lower half is multiplied again, because a highest bit stays one however it is multiplied.
extern "C" __global__ void spot_hash(const uint64_t* x, uint64_t nbytes, uint64_t run, unsigned long long* slots) {
    const uint64_t first = blockIdx.x * (TILE / 8);
    uint64_t sum = 0;
    if (8 * first + TILE <= nbytes && reinterpret_cast<uint64_t>(x) % 16 == 0) {  // all loads of a whole tile are under way at once
        const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(x + first);
        ulonglong2 words[PAIRS];
        #pragma unroll
        for (int k = 0; k < PAIRS; ++k) words[k] = pairs[k * THREADS + threadIdx.x];
        #pragma unroll
        for (int k = 0; k < PAIRS; ++k) {
            const uint64_t i = first + 2 * (k * THREADS + threadIdx.x);
            sum += mix(words[k].x, i) + mix(words[k].y, i + 1);
        }
    } else {
        const uint64_t many = (nbytes + 7) / 8;
        for (uint64_t i = first + threadIdx.x; i < first + TILE / 8 && i < many; i += THREADS) {
            uint64_t word = 0;
            if (8 * i + 8 <= nbytes) {
                word = x[i];
            } else {
                for (uint64_t b = 8 * i; b < nbytes; ++b) word |= static_cast<uint64_t>(reinterpret_cast<const uint8_t*>(x)[b]) << 8 * (b - 8 * i);
            }
            sum += mix(word, i);
        }
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0) atomicAdd(slots + first / run, static_cast<unsigned long long>(sum));
}

extern "C" __global__ void spot_rows_bf16(const void* x, const double* v, double* out, uint64_t rows, uint64_t columns) {
    rows_of<2>(x, v, out, rows, columns);
}
extern "C" __global__ void spot_rows_f32(const void* x, const double* v, double* out, uint64_t rows, uint64_t columns) {
    rows_of<4>(x, v, out, rows, columns);
}
extern "C" __global__ void spot_columns_bf16(const void* x, const double* v, double* out, uint64_t rows, uint64_t columns) {
    columns_of<2>(x, v, out, rows, columns);
}
extern "C" __global__ void spot_columns_f32(const void* x, const double* v, double* out, uint64_t rows, uint64_t columns) {
    columns_of<4>(x, v, out, rows, columns);
}

// out[i] = x[places[i]], elements of `size` bytes: 1, 2, 4 or 8.
extern "C" __global__ void spot_gather(const uint8_t* x, const int64_t* places, uint8_t* out, uint64_t many, uint64_t size) {
    const uint64_t i = static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= many) return;
    for (uint64_t b = 0; b < size; ++b) out[i * size + b] = x[static_cast<uint64_t>(places[i]) * size + b];
}
