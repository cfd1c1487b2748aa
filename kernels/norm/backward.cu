// Backward of RMSNorm and LayerNorm, bf16: dx, and partial sums of dgamma (and dbeta), which elementwise/columns.cu adds up.
//   xhat = (x - mean) rstd;  g = dy gamma;  dx = rstd (g - mean(g) - xhat mean(g xhat)) [+ residual];  RMSNorm: without mean and mean(g).
//   dgamma = sum over rows of dy xhat;  dbeta = sum over rows of dy.
//
// Compile-time parameters
//   NORM_LAYER    as in forward.cu
//   NORM_ADD      1: adds the gradient that comes down the residual stream to dx
//   NORM_THREADS  threads of a team, which computes one row at a time
//   NORM_TEAMS    teams of a CTA
//   NORM_VECTORS  16-byte vectors of a row that each thread holds: width <= THREADS * VECTORS * 8
//   NORM_DEPTH    rows of a team that are on their way or in use: its ring in shared memory
//   NORM_BLOCKS   CTAs that should fit a multiprocessor (caps registers)
//
// Work. All teams of all `parts` walk over the rows together: team t of part q takes rows q TEAMS + t, + parts TEAMS, .... Each thread
//   copies its own vectors of x, dy (and the residual gradient) into slots of shared memory that no other thread touches, DEPTH rows ahead,
//   so bytes in flight cost no registers and no barrier. It keeps its columns of gamma, and of dgamma and dbeta, which it adds up row after
//   row, in registers. At the end the teams' sums are added in the order 0, 1, ... through the same shared memory and written as row
//   `part` of partial[][parts][width]. A CTA takes parts blockIdx.x, + gridDim.x, ...: the grid decides no bits; parts and TEAMS do.
// Bytes. dy, x read, dx written (ADD: the residual gradient read): 6 or 8 C per row; statistics; partials 4 C (8 C) per part.
// Registers. 8 VECTORS (LAYER: 16) for the sums, 4 VECTORS for gamma, about 40 the rest. Shared memory: 16 THREADS TEAMS VECTORS
//   (2 or 3) DEPTH bytes, and the sums of teams of several warps.
// Ordering. Slots are private (see common/copy.cuh). Teams of several warps have one barrier per row (reduce::Team). Behind the last row:
//   every thread waits for its copies, __syncthreads, writes its sums over the slots, __syncthreads, the sums are added, __syncthreads
//   before the slots of the next part are filled. These three are barrier 0 of all ALL threads, outside every branch that threads of a
//   part do not take together; teams use barriers 1 to 15. A team without a row in the last round passes its barrier once more, so that all
//   warps have passed equally many: correctness does not need it, racecheck does (compute-sanitizer 2025.3). Where warps passed
//   different numbers of named barriers before a common __syncthreads, that release now and then reports what lies on its two sides as a
//   race, in no run where the numbers are equal; 2026.3 in no run at all, and both report it when the __syncthreads is gone.
//   kernels/checks/bandwidth/orders.py runs this text with its threads in three orders: the same bits, and other bits without the teams'
//   barrier or the one before the addition.
#include "../common/copy.cuh"
#include "../common/reduce.cuh"
#include "../common/vector.cuh"

constexpr bool LAYER = NORM_LAYER;
constexpr bool ADD = NORM_ADD;
constexpr int THREADS = NORM_THREADS;
constexpr int TEAMS = NORM_TEAMS;
constexpr int VECTORS = NORM_VECTORS;
constexpr int DEPTH = NORM_DEPTH;
constexpr int ALL = THREADS * TEAMS;

using vec::Bf16;
constexpr int N = vec::PER<Bf16>;
constexpr int SUMS = LAYER ? 2 : 1;
constexpr int TENSORS = ADD ? 3 : 2;
using Row = vec::Group<Bf16, N>;
using Team = reduce::Team<THREADS, TEAMS, SUMS>;

static_assert(DEPTH * TENSORS * 16 >= SUMS * N * 4, "the sums fit the ring");

struct Problem {
    const Bf16* dy;
    const Bf16* x;
    const Bf16* gamma;
    const float* mean;  // LAYER
    const float* rstd;
    const Bf16* residual;  // ADD
    Bf16* dx;
    float* partial;  // [SUMS][parts][width]: dgamma, dbeta
    int rows, width, parts;
    float inverse_width;
};

extern "C" __global__ void __launch_bounds__(ALL, NORM_BLOCKS) norm_backward(const __grid_constant__ Problem p) {
    extern __shared__ uint4 slots[];
    __shared__ Team::Shared shared;
    ptx::grid_dependency_launch();
    Team reduction(shared);
    const int team = static_cast<int>(threadIdx.x) / THREADS;
    const int thread = static_cast<int>(threadIdx.x) - team * THREADS;
    const uint32_t slot0 = static_cast<uint32_t>(__cvta_generic_to_shared(slots)) + 16 * threadIdx.x;
    const int stride = p.parts * TEAMS;

    const auto column_of = [&](int k) { return (thread + k * THREADS) * N; };
    const auto slot_of = [&](int stage, int tensor, int k) { return slot0 + 16 * ALL * ((stage * TENSORS + tensor) * VECTORS + k); };
    const auto fetch = [&](int row, int stage, int k) {
        if (row < p.rows && column_of(k) < p.width) {
            const size_t at = static_cast<size_t>(row) * p.width + column_of(k);
            copy::copy_async(slot_of(stage, 0, k), p.x + at, 16);
            copy::copy_async(slot_of(stage, 1, k), p.dy + at, 16);
            if (ADD) copy::copy_async(slot_of(stage, 2, k), p.residual + at, 16);
        }
    };

    Row gamma[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        gamma[k].clear();
        if (column_of(k) < p.width) gamma[k].load<vec::Cache::keep>(p.gamma + column_of(k));
    }
    for (int part = static_cast<int>(blockIdx.x); part < p.parts; part += static_cast<int>(gridDim.x)) {
        float sums[SUMS][VECTORS][N];
#pragma unroll
        for (int s = 0; s < SUMS; ++s)
#pragma unroll
            for (int k = 0; k < VECTORS; ++k)
#pragma unroll
                for (int i = 0; i < N; ++i) sums[s][k][i] = 0.0f;
        int row = part * TEAMS + team;
        float next_rstd = row < p.rows ? __ldg(p.rstd + row) : 0.0f;
        float next_mean = LAYER && row < p.rows ? __ldg(p.mean + row) : 0.0f;
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
            for (int k = 0; k < VECTORS; ++k) fetch(row + d * stride, d, k);
            copy::copy_commit();
        }
        int stage = 0;
        for (; row < p.rows; row += stride) {
            const float rstd = next_rstd, mean = next_mean;
            const int after = min(row + stride, p.rows - 1);
            next_rstd = __ldg(p.rstd + after);
            if (LAYER) next_mean = __ldg(p.mean + after);
            copy::copy_wait<DEPTH - 1>();
            float means[SUMS];
#pragma unroll
            for (int s = 0; s < SUMS; ++s) means[s] = 0.0f;
#pragma unroll
            for (int k = 0; k < VECTORS; ++k) {
                if (column_of(k) < p.width) {
                    const Row x = vec::group<Bf16>(copy::read_slot(slot_of(stage, 0, k)));
                    const Row dy = vec::group<Bf16>(copy::read_slot(slot_of(stage, 1, k)));
#pragma unroll
                    for (int i = 0; i < N; ++i) {
                        const float along = dy[i] * ((LAYER ? x[i] - mean : x[i]) * rstd);
                        sums[0][k][i] += along;
                        means[0] += along * gamma[k][i];
                        if (LAYER) {
                            sums[SUMS - 1][k][i] += dy[i];
                            means[SUMS - 1] += dy[i] * gamma[k][i];
                        }
                    }
                }
                gamma[k].unpack_anew();
            }
            reduction.sum(means);
            const float along = means[0] * p.inverse_width;
            const float shift = LAYER ? means[SUMS - 1] * p.inverse_width : 0.0f;
#pragma unroll
            for (int k = 0; k < VECTORS; ++k) {
                if (column_of(k) < p.width) {
                    const Row x = vec::group<Bf16>(copy::read_slot(slot_of(stage, 0, k)));
                    const Row dy = vec::group<Bf16>(copy::read_slot(slot_of(stage, 1, k)));
                    Row residual;
                    if (ADD) residual = vec::group<Bf16>(copy::read_slot(slot_of(stage, 2, k)));
                    float dx[N];
#pragma unroll
                    for (int i = 0; i < N; ++i) {
                        const float xhat = (LAYER ? x[i] - mean : x[i]) * rstd;
                        const float g = dy[i] * gamma[k][i];
                        dx[i] = rstd * ((LAYER ? g - shift : g) - xhat * along);
                        if (ADD) dx[i] += residual[i];
                    }
                    Row out;
                    out.set(dx);
                    out.store(p.dx + static_cast<size_t>(row) * p.width + column_of(k));
                }
                gamma[k].unpack_anew();
                fetch(row + DEPTH * stride, stage, k);
            }
            copy::copy_commit();
            stage = stage + 1 == DEPTH ? 0 : stage + 1;
        }
        if constexpr (TEAMS > 1 && THREADS > 32) {
            if (row < p.rows + team) ptx::named_barrier_sync(1 + team, THREADS);  // the last round has rows, but none for this team
        }
        copy::copy_wait<0>();
        __syncthreads();
        // the sums lie as 16-byte quarters or halves of a vector: [team][sum][k][half][thread]
        constexpr int HALVES = N / 4;
        constexpr int PIECES = SUMS * VECTORS * HALVES;
#pragma unroll
        for (int s = 0; s < SUMS; ++s)
#pragma unroll
            for (int k = 0; k < VECTORS; ++k)
#pragma unroll
                for (int h = 0; h < HALVES; ++h) {
                    const float* const from = sums[s][k] + 4 * h;
                    slots[(team * PIECES + (s * VECTORS + k) * HALVES + h) * THREADS + thread] =
                        make_uint4(__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]), __float_as_uint(from[3]));
                }
        __syncthreads();
        for (int piece = static_cast<int>(threadIdx.x); piece < PIECES * THREADS; piece += ALL) {
            const int owner = piece % THREADS, h = piece / THREADS % HALVES, k = piece / THREADS / HALVES % VECTORS;
            const int s = piece / THREADS / HALVES / VECTORS;
            const int column = (owner + k * THREADS) * N + 4 * h;
            if (column < p.width) {
                float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
                for (int t = 0; t < TEAMS; ++t) {
                    const uint4 r = slots[t * PIECES * THREADS + piece];
                    total[0] += __uint_as_float(r.x);
                    total[1] += __uint_as_float(r.y);
                    total[2] += __uint_as_float(r.z);
                    total[3] += __uint_as_float(r.w);
                }
                vec::Group<float, 4> out;
                out.set(total);
                out.store(p.partial + (static_cast<size_t>(s) * p.parts + part) * p.width + column);
            }
        }
        __syncthreads();
    }
}
