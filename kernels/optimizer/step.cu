// Everything scalar of an update in one small launch, so that nothing comes to the host: the tree of global_norm, then norm, mean norm,
// clip coefficient, finite flag, learning rate, number of finished updates. Semantics of
// alpha/ops/{global_norm,clip_coefficient,finite_flag,learning_rate,next_step}.py.
//
// Work. One CTA of 1024 threads. Parts come 8 to a block: a thread adds eight neighbours ((0+1)+(2+3))+((4+5)+(6+7)) into shared memory,
//   then levels of neighbours, an odd one carried, as the row says. Thread 0 finishes; thread 32 copies the rate out of its table
//   meanwhile.
// Shared memory: 4 bytes per block. Bytes: 4 per part, 4 of the table; the time is latency, some microseconds.
// Ordering. __syncthreads between levels: level s writes multiples of 2s and reads multiples of s; the next level reads them after it.
//   `step` may be `next`: the one thread that reads it writes it last. Consumers get the old count from `used`.
#include "../common/vector.cuh"

struct Problem {
    const float* parts;  // [blocks][8]
    const float* loss;   // sum of losses, and after it nothing else is read
    const float* count;  // tokens that count, fp32
    const int* step;     // finished updates
    const float* rates;  // [last + 1]: the rate after 0, 1, ... finished updates; past the end the last one
    float* norm;
    float* mean_norm;
    float* coefficient;
    int* finite;
    float* lr;
    int* used;  // the count of finished updates that this update starts from
    int* next;  // that count, + 1 if finite
    int blocks;
    int last;
    float max_norm;
    int padding;
};

extern "C" __global__ void __launch_bounds__(1024, 1) step(const __grid_constant__ Problem p) {
    extern __shared__ float sums[];
    const int thread = static_cast<int>(threadIdx.x);
    const int step = *p.step;
    for (int b = thread; b < p.blocks; b += 1024) {
        vec::Group<float, 4> low, high;
        low.load(p.parts + 8 * static_cast<size_t>(b));
        high.load(p.parts + 8 * static_cast<size_t>(b) + 4);
        sums[b] = ((low[0] + low[1]) + (low[2] + low[3])) + ((high[0] + high[1]) + (high[2] + high[3]));
    }
    if (thread == 32) *p.lr = __ldg(p.rates + min(step, p.last));
    __syncthreads();
    for (int s = 1; s < p.blocks; s *= 2) {
        for (int i = thread * 2 * s; i + s < p.blocks; i += 1024 * 2 * s) sums[i] += sums[i + s];
        __syncthreads();
    }
    if (thread == 0) {
        const float norm = p.blocks > 0 ? sqrtf(sums[0]) : 0.0f;
        const float loss = *p.loss;
        const float tokens = *p.count;
        const float count = tokens < 1.0f ? 1.0f : tokens;  // NaN stays NaN
        const float mean = norm / count;
        const float factor = mean > p.max_norm && p.max_norm > 0.0f ? p.max_norm / mean : 1.0f;
        const int finite = isfinite(norm) && isfinite(loss) ? 1 : 0;
        *p.norm = norm;
        *p.mean_norm = mean;
        *p.coefficient = factor / count;
        *p.finite = finite;
        *p.used = step;
        *p.next = step + finite;
    }
}
