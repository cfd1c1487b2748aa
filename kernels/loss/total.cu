// Sum of the row losses and number of rows that count: out[0] = sum of loss[N], out[1] = number of targets that are not ignored, both fp32,
// or added to what is there (the next microbatch). TOTAL_ACCUMULATE 0: overwrite;  1: add.
//
// Work. One CTA of 1024 threads: thread t adds elements t, t + 1024, ... in order, then the butterfly of each warp, then warps 0..31. The
//   order depends on N alone. Bytes: 8 per row (N of 65,536: half a megabyte, mostly latency, four loads in flight).
// Ordering: one barrier between the warps' writes and the reads of the final sum (reduce::Team).
#include "../common/reduce.cuh"

extern "C" __global__ void __launch_bounds__(1024, 1)
    loss_total(const float* loss, const int* targets, float* out, int rows, int ignore) {
    using Team = reduce::Team<1024, 1, 2>;
    __shared__ Team::Shared shared;
    Team team(shared);
    float sums[2] = {0.0f, 0.0f};
#pragma unroll 8
    for (int row = static_cast<int>(threadIdx.x); row < rows; row += 1024) {
        sums[0] += __ldg(loss + row);
        sums[1] += __ldg(targets + row) != ignore ? 1.0f : 0.0f;
    }
    team.sum(sums);
    if (threadIdx.x < 2) {
        const float value = threadIdx.x == 0 ? sums[0] : sums[1];
        out[threadIdx.x] = TOTAL_ACCUMULATE ? out[threadIdx.x] + value : value;
    }
}
