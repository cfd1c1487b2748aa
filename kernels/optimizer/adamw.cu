// AdamW over a flat buffer of state units in one launch; semantics of alpha/ops/adamw.py. Per element of a chunk, t = step + 1, g = grad c:
//   m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  p <- p - lr s ((m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + wd d p)
//   c (coefficient), lr, step, finite are device scalars; s (lr scale) and d (decay) belong to the chunk. finite == 0: nothing is touched.
//
// Compile-time parameters
//   ADAMW_COPY   0: no copy;  1: bf16 copy of p, rounded to nearest even
//
// Work. A chunk is a run of at most PARTS * PART elements of one tensor, from a table that the host made; what lies between tensors is in
//   no chunk. A CTA takes one PART of a chunk, 4 neighbouring elements a thread (16 bytes of p, g, m, v each), and ends: short CTAs walk
//   through memory on a narrow front. (With a limit on the grid it takes parts b, b + grid, ....) A tensor that starts off a 16-byte
//   boundary, and a last group of less than 4, go element by element. Elements are independent, so bits depend on nothing else.
// Bytes. 28 per element (16 read, 12 written), 30 with the copy; the table is 1/1000 of that. Stores leave L2 first (common/once.cuh).
// Bias corrections. 1 - b^t = -expm1(t log b): the host gives log b in double precision, and expm1 does not cancel. A launch of one thread
//   finds them for all: some 100 instructions, a third of a thread's, and a GPU at its power limit pays for each.
//   No shared memory, no barrier. Registers: 16 of one group, about 30 the rest.
#include "../common/once.cuh"

constexpr bool COPY = ADAMW_COPY;
constexpr int THREADS = 256;
constexpr int PART = 4 * THREADS;
constexpr int PARTS = 8;  // of a chunk of 8192 elements at most

struct Chunk {
    long long start;
    int length;
    float decay, lr_scale;
    int padding;
};

struct Problem {
    float* param;
    const float* grad;
    float* m;
    float* v;
    vec::Bf16* copy;  // COPY
    const Chunk* chunks;
    const float* coefficient;
    const float* lr;
    const float* corrections;  // 1 / (1 - b1^t), 1 / (1 - b2^t)
    const int* finite;
    float keep1, take1, keep2, take2;  // beta, 1 - beta
    float eps, weight_decay;
    int count;  // chunks
};

struct Factors {
    float coefficient, scale1, scale2, rate, decay;  // 1 / (1 - b1^t), 1 / (1 - b2^t), lr * lr_scale, weight_decay * decay
};

__device__ __forceinline__ void update(float& p, float g, float& m, float& v, const Factors& f, const Problem& problem) {
    g *= f.coefficient;
    m = problem.keep1 * m + problem.take1 * g;
    v = problem.keep2 * v + problem.take2 * (g * g);
    const float ratio = (m * f.scale1) / (sqrtf(v * f.scale2) + problem.eps);
    p -= f.rate * (ratio + f.decay * p);
}

using Four = vec::Group<float, 4>;

__device__ __forceinline__ void update_four(const Problem& problem, const Factors& f, long long at, Four p, Four g, Four m, Four v) {
    float pf[4], mf[4], vf[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pf[i] = p[i];
        mf[i] = m[i];
        vf[i] = v[i];
        update(pf[i], g[i], mf[i], vf[i], f, problem);
    }
    p.set(pf);
    m.set(mf);
    v.set(vf);
    vec::store_once(problem.param + at, p);
    vec::store_once(problem.m + at, m);
    vec::store_once(problem.v + at, v);
    if (COPY) vec::store8_once(problem.copy + at, make_uint2(ptx::pack_bf16(pf[0], pf[1]), ptx::pack_bf16(pf[2], pf[3])));
}

__device__ __forceinline__ void update_one(const Problem& problem, const Factors& f, long long at) {
    float p = problem.param[at], m = problem.m[at], v = problem.v[at];
    update(p, problem.grad[at], m, v, f, problem);
    problem.param[at] = p;
    problem.m[at] = m;
    problem.v[at] = v;
    if (COPY) problem.copy[at] = vec::from_float<vec::Bf16>(p);
}

// 1 / (1 - b^t) from log b; b = 0 has -inf.
__device__ __forceinline__ float correction(int t, double log_beta) { return -1.0f / expm1f(static_cast<float>(t * log_beta)); }

// Both corrections at step + 1. log1, log2: natural logarithms of the betas. One thread.
extern "C" __global__ void __launch_bounds__(1) adamw_corrections(const int* step, double log1, double log2, float* corrections) {
    corrections[0] = correction(*step + 1, log1);
    corrections[1] = correction(*step + 1, log2);
}

extern "C" __global__ void __launch_bounds__(THREADS, 5) adamw(const __grid_constant__ Problem p) {
    if (__ldg(p.finite) == 0) return;
    Factors f;
    f.coefficient = __ldg(p.coefficient);
    f.scale1 = __ldg(p.corrections);
    f.scale2 = __ldg(p.corrections + 1);
    const float lr = __ldg(p.lr);
    for (int item = static_cast<int>(blockIdx.x); item < p.count * PARTS; item += static_cast<int>(gridDim.x)) {
        const Chunk chunk = p.chunks[item / PARTS];
        const int first = item % PARTS * PART, last = min(chunk.length, first + PART);
        f.rate = lr * chunk.lr_scale;
        f.decay = p.weight_decay * chunk.decay;
        const int whole = chunk.start % 4 == 0 ? max(first, last / 4 * 4) : first;  // below it by fours
        const int i = first + 4 * static_cast<int>(threadIdx.x);
        if (i < whole) {
            const long long at = chunk.start + i;
            Four a[4];
            a[0].load(p.param + at);
            a[1].load(p.grad + at);
            a[2].load(p.m + at);
            a[3].load(p.v + at);
            update_four(p, f, at, a[0], a[1], a[2], a[3]);
        }
        for (int j = whole + static_cast<int>(threadIdx.x); j < last; j += THREADS) update_one(p, f, chunk.start + j);
    }
}
