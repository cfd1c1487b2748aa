// Sums of squares of a flat gradient buffer, by the fixed blocks of alpha/ops/global_norm.py; optimizer/step.cu adds them by the fixed
// tree.
//
// Work. Each block of at most 65,536 elements is cut into PARTS runs of 8,192, one per CTA of 256 threads: each thread adds the squares of
//   its 16-byte groups in a register (all 8 loads in flight), then the CTA in a fixed order (reduce::Team). parts[block * PARTS + run] is
//   written by its CTA alone, 0 where the block is shorter, so the tree of step.cu starts below the blocks without changing above them.
//   Bits depend on the block table alone.
// Bytes: 4 per element. Registers: 32 hold the loads. A block that starts off a 16-byte boundary goes element by element.
#include "../common/reduce.cuh"
#include "../common/vector.cuh"

constexpr int THREADS = 256;
constexpr int RUN = 8192;
constexpr int PARTS = 8;
constexpr int DEEP = RUN / (THREADS * 4);

struct Block {
    long long start;
    int length, padding;
};

extern "C" __global__ void __launch_bounds__(THREADS, 4) global_norm(const float* grads, const Block* blocks, float* parts) {
    using Team = reduce::Team<THREADS, 1, 1>;
    __shared__ Team::Shared shared;
    Team team(shared);
    const Block block = blocks[blockIdx.x / PARTS];
    const int first = static_cast<int>(blockIdx.x % PARTS) * RUN;
    const int length = min(RUN, block.length - first);
    const float* const from = grads + block.start + first;
    float total[1] = {0.0f};
    if (length == RUN && block.start % 4 == 0) {
        vec::Group<float, 4> x[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; ++d) x[d].load(from + (threadIdx.x + d * THREADS) * 4);
#pragma unroll
        for (int d = 0; d < DEEP; ++d)
#pragma unroll
            for (int i = 0; i < 4; ++i) total[0] += x[d][i] * x[d][i];
    } else {
        for (int i = static_cast<int>(threadIdx.x); i < length; i += THREADS) total[0] += from[i] * from[i];
    }
    team.sum(total);
    if (threadIdx.x == 0) parts[blockIdx.x] = total[0];
}
