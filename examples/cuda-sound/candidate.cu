// Softmax of each row. A block of 256 threads takes a row; sums run in a fixed order. They are float64 until the result is rounded, once:
// in float32 small terms beside a large one are lost, each by itself.
constexpr int THREADS = 256;

__device__ __forceinline__ float largest_of_warp(float v) {
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, v, step);
        v = v > other ? v : other;
    }
    return v;
}

extern "C" __global__ void __launch_bounds__(256) softmax(const float* x, float* y, long long rows, long long columns) {
    __shared__ float tops[THREADS / 32];
    __shared__ double sums[THREADS];
    const float* from = x + blockIdx.x * columns;
    float* to = y + blockIdx.x * columns;
    const int warp = threadIdx.x / 32;

    float top = -__builtin_huge_valf();
    for (long long i = threadIdx.x; i < columns; i += THREADS) top = from[i] > top ? from[i] : top;
    top = largest_of_warp(top);
    if (threadIdx.x % 32 == 0) tops[warp] = top;
    __syncthreads();
    for (int w = 0; w < THREADS / 32; ++w) top = tops[w] > top ? tops[w] : top;

    double sum = 0.0;
    for (long long i = threadIdx.x; i < columns; i += THREADS) sum += exp(double(from[i]) - top);
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }

    for (long long i = threadIdx.x; i < columns; i += THREADS) to[i] = float(exp(double(from[i]) - top) / sums[0]);
}
