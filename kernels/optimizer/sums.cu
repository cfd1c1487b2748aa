// What lies between optimizer/global_norm.cu and optimizer/step.cu where ranks sum their own blocks of the norm and tell each other.
//
//   fold     sums[b] = parts[b][0..8], by the additions with which step.cu begins
//   unfold   parts[b] = sums[b] and seven zeros, of which step.cu makes sums[b] again: s + 0 is s, for sums of squares are no -0
//
// Work. A thread takes one block. Bytes: 36 per block. No shared memory, no barrier; bits depend on nothing but the operands.
#include "../common/vector.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) fold(const float* parts, float* sums, int blocks) {
    const int b = static_cast<int>(blockIdx.x) * THREADS + static_cast<int>(threadIdx.x);
    if (b >= blocks) return;
    vec::Group<float, 4> low, high;
    low.load(parts + 8 * static_cast<size_t>(b));
    high.load(parts + 8 * static_cast<size_t>(b) + 4);
    sums[b] = ((low[0] + low[1]) + (low[2] + low[3])) + ((high[0] + high[1]) + (high[2] + high[3]));
}

extern "C" __global__ void __launch_bounds__(THREADS) unfold(const float* sums, float* parts, int blocks) {
    const int b = static_cast<int>(blockIdx.x) * THREADS + static_cast<int>(threadIdx.x);
    if (b >= blocks) return;
    const float first[4] = {sums[b], 0.0f, 0.0f, 0.0f};
    const float zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    vec::Group<float, 4> low, high;
    low.set(first);
    high.set(zeros);
    low.store(parts + 8 * static_cast<size_t>(b));
    high.store(parts + 8 * static_cast<size_t>(b) + 4);
}
