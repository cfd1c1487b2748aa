// Flash attention forward, Hopper. bf16 in and out, fp32 accumulation, log-sum-exp saved.
//
// A CTA works on tiles of W*64 query rows, handed out by a counter, longest first. Warpgroup 0 is the producer (one thread issues all
// copies; 40 registers for W = 2, else 32); warpgroups 1..W are consumers with 64 query rows each (232, 160 or 112 registers for
// W = 2, 3, 4). At entry: 168, 128 or 96 registers a thread, so that the later sum fits.
//   variant        tile (q x k)  stages  shared memory                           accumulators per thread (S + O + P)
//   d128 w2 n128   128 x 128     2       Q 2 x 32K + K 64K + V 64K = 192K        64 + 64 + 32
//   d96  w2 n128   as d128: columns 96 .. 127 are zeros; S leaves them out, O has them (ATTN_WIDTH=96, a compiled file of its own)
//   d64  w3 n128   192 x 128     4       Q 2 x 24K + K 64K + V 64K = 176K        64 + 32 + 32
//   d64  w4 n64    256 x 64      6       Q 2 x 32K + K 48K + V 48K = 160K        32 + 32 + 16     (short causal problems)
// plus 1 KB to align and less than 512 bytes of barriers.
//
// Per key block a consumer issues S(n) = Q K(n)^T and O += P(n-1) V(n-1), works on the softmax of S(n) while the second product runs,
// then rescales O. P stays in registers. Consumers take turns at issuing (named barriers 1..W), so that one's softmax runs under
// another's products. A consumer skips blocks that only its neighbours' rows can see. The next tile's Q lands in the other place of
// Q while this tile is worked on.
//
// Barriers, and why each is enough:
//   q_full[s][w]    copy engine -> consumer w: bytes of its 64 rows in place s of Q. One phase per two tiles.
//   q_empty[s][w]   one thread of consumer w -> producer, after the output staged in place s (its own copy group) has been read. It
//                   arrives in the next tile, which has its own place, so nothing waits in a circle.
//   k_full[s], v_full[s]    copy engine -> consumers.
//   k_empty[s], v_empty[s]  one lane per consumer warp (4 W arrivals), after the wait that retires the last product reading it. A
//                           warp's wait retires only its own share of a warpgroup product, hence one arrival per warp. A consumer
//                           that skips a block waits for `full` first: it cannot arrive twice in one phase.
//   named 1+w    W consumers in a ring: each waits its turn, issues, hands on. All do the same number of rounds per tile (skipped
//                blocks included), so the ring carries over tiles; one unconsumed arrival is left at the end, which is harmless.
//   named 8+w    the 128 threads of consumer w: (a) all its products on Q have retired before O overwrites Q; (b) all of O is in shared
//                memory, and fenced for the copy engine by its writers, before one thread issues the store.
//   queue        see Queue in parts.cuh.
// Each tile is computed by one CTA in a fixed order of key blocks, and no block reads what another wrote: the bits do not depend on
// the grid, on timing or on which CTA drew which tile.
//
// Tensor maps, coordinates (d, s, h, b): Q and O with boxes of 64 x 64, K and V of 64 x BN.
#include "parts.cuh"

namespace attn {

template <int D, int W, int BN, int STAGES>
struct ForwardShared {
    static constexpr int Q = 64 * D * 2, K = BN * D * 2;  // bytes of one warpgroup's queries, of one key block
    uint8_t q[2][W][Q], k[STAGES][K], v[STAGES][K];
    mbarrier_t q_full[2][W], q_empty[2][W], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    Queue queue;
};

// Online softmax in base 2 with the scale folded in. `max` and `sum` belong to the thread's two rows; sums are the thread's own
// columns only and are joined at the end.
struct Running {
    float max[2] = {-infinity(), -infinity()}, sum[2] = {0.f, 0.f};

    // Turns logits into exp2(c * (s - max)); returns in `fix` the factor that older sums and outputs need.
    template <int BN> __device__ __forceinline__ void step(float (&s)[BN / 2], float c, float (&fix)[2]) {
        float a0 = max[0], a1 = max[1], b0 = max[0], b1 = max[1];
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            a0 = fmaxf(a0, s[4 * j]);
            b0 = fmaxf(b0, s[4 * j + 1]);
            a1 = fmaxf(a1, s[4 * j + 2]);
            b1 = fmaxf(b1, s[4 * j + 3]);
        }
        a0 = fmaxf(a0, b0);
        a1 = fmaxf(a1, b1);
        a0 = fmaxf(a0, __shfl_xor_sync(~0u, a0, 1));
        a1 = fmaxf(a1, __shfl_xor_sync(~0u, a1, 1));
        a0 = fmaxf(a0, __shfl_xor_sync(~0u, a0, 2));
        a1 = fmaxf(a1, __shfl_xor_sync(~0u, a1, 2));
        const float n0 = a0 == -infinity() ? 0.f : a0 * c, n1 = a1 == -infinity() ? 0.f : a1 * c;
        fix[0] = exp2_approx(fmaf(max[0], c, -n0));
        fix[1] = exp2_approx(fmaf(max[1], c, -n1));
        max[0] = a0;
        max[1] = a1;
        float t0 = 0.f, t1 = 0.f, u0 = sum[0] * fix[0], u1 = sum[1] * fix[1];
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            u0 += s[4 * j] = exp2_approx(fmaf(s[4 * j], c, -n0));
            t0 += s[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], c, -n0));
            u1 += s[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], c, -n1));
            t1 += s[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], c, -n1));
        }
        sum[0] = u0 + t0;
        sum[1] = u1 + t1;
    }
};

// D: columns of the tiles, a multiple of 64. WIDTH: those of a head; the copy engine fills the rest with zeros and does not store it.
template <int D, int W, int BN, int STAGES, bool TURNS, int WIDTH>
__device__ __forceinline__ void forward(const TensorMap* map_q, const TensorMap* map_k, const TensorMap* map_v, const TensorMap* map_o,
                                        const Params& p) {
    using Shared = ForwardShared<D, W, BN, STAGES>;
    extern __shared__ uint8_t raw[];
    Shared& sh = *reinterpret_cast<Shared*>(raw + ((1024 - (smem_address(raw) & 1023)) & 1023));
    const int wg = warp_index() / 4;

    if (threadIdx.x == 0) {
        for (int w = 0; w < W; ++w) {
            for (int s = 0; s < 2; ++s) {
                mbarrier_init(&sh.q_full[s][w], 1);
                mbarrier_init(&sh.q_empty[s][w], 1);
            }
        }
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(&sh.k_full[s], 1);
            mbarrier_init(&sh.v_full[s], 1);
            mbarrier_init(&sh.k_empty[s], 4 * W);
            mbarrier_init(&sh.v_empty[s], 4 * W);
        }
        sh.queue.init(4 * W);
        mbarrier_init_fence();
    }
    __syncthreads();

    const int nblocks = (p.Sq + 64 * W - 1) / (64 * W), nheads = p.B * p.H, tiles = nblocks * nheads;
    const bool reversed = p.right < UNBOUNDED;

    if (wg == 0) {
        registers_decrease<(W > 2 ? 32 : 40)>();
        if (threadIdx.x == 0) {
            tma_prefetch_map(map_q);
            tma_prefetch_map(map_k);
            tma_prefetch_map(map_v);
            RingState<STAGES> ks(1), vs(1);
            RingState<2> qs(1);
            RingState<2> slot(1);
            int t = blockIdx.x;
            for (sh.queue.give(slot, t); t < tiles; sh.queue.give(slot, t)) {
                const Tile tile = tile_at(t, nblocks, nheads, p.section, reversed);
                const int b = tile.head / p.H, h = tile.head - b * p.H, hk = h / (p.H / p.Hkv), m0 = tile.block * 64 * W;
                const Blocks n = blocks<BN>(keys_of(p, b, m0), keys_of(p, b, m0 + 64 * W - 1));
                auto load_k = [&](int j) {
                    mbarrier_wait(&sh.k_empty[ks.slot], ks.parity);
                    mbarrier_arrive_expect(&sh.k_full[ks.slot], Shared::K);
                    load_rows<BN, D>(sh.k[ks.slot], map_k, &sh.k_full[ks.slot], j * BN, hk, b);
                    ks.advance();
                };
                if (n.end > n.begin) load_k(n.end - 1);
                for (int w = 0; w < W; ++w) {
                    mbarrier_wait(&sh.q_empty[qs.slot][w], qs.parity);
                    mbarrier_arrive_expect(&sh.q_full[qs.slot][w], Shared::Q);
                    load_rows<64, D>(sh.q[qs.slot][w], map_q, &sh.q_full[qs.slot][w], m0 + 64 * w, h, b);
                }
                qs.advance();
                for (int j = n.end - 1; j >= n.begin; --j) {
                    if (j > n.begin) load_k(j - 1);
                    mbarrier_wait(&sh.v_empty[vs.slot], vs.parity);
                    mbarrier_arrive_expect(&sh.v_full[vs.slot], Shared::K);
                    load_rows<BN, D>(sh.v[vs.slot], map_v, &sh.v_full[vs.slot], j * BN, hk, b);
                    vs.advance();
                }
                t = Queue::draw(p.queue);
            }
            Queue::leave(p.queue);
        }
    } else {
        registers_increase<(W == 4 ? 112 : W == 3 ? 160 : 232)>();
        const int w = wg - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        const float c = p.scale * LOG2_E;
        RingState<STAGES> ks(0), vs(0);
        RingState<2> qs(0);
        bool stored = false;
        auto free_q = [&] {  // the other place of Q, once the output staged there has been read; late, when products are running
            if (stored && threadIdx.x % 128 == 0) {
                tma_store_wait_read<0>();
                mbarrier_arrive(&sh.q_empty[qs.slot ^ 1][w]);
            }
        };
        if (TURNS && w == W - 1) named_barrier_arrive(1, 256);

        RingState<2> slot(0);
        for (int t = sh.queue.take(slot); t < tiles; t = sh.queue.take(slot)) {
            const Tile tile = tile_at(t, nblocks, nheads, p.section, reversed);
            const int b = tile.head / p.H, h = tile.head - b * p.H, m0 = tile.block * 64 * W;
            const Blocks n = blocks<BN>(keys_of(p, b, m0), keys_of(p, b, m0 + 64 * W - 1));
            const int row = m0 + 64 * w + 16 * warp + lane / 4;
            const Span span0 = keys_of(p, b, row), span1 = keys_of(p, b, row + 8);

            // this warpgroup's own blocks, among those that the CTA loads
            Blocks own = blocks<BN>(keys_of(p, b, m0 + 64 * w), keys_of(p, b, m0 + 64 * w + 63));
            if (m0 + 64 * w >= p.Sq) own.end = own.begin;

            float o[D / 2] = {};
            Running run;
            uint8_t* q = sh.q[qs.slot][w];
            mbarrier_wait(&sh.q_full[qs.slot][w], qs.parity);
            auto pass = [&](int count) {  // blocks that only other warpgroups need
                for (int i = 0; i < count; ++i) {
                    mbarrier_wait(&sh.k_full[ks.slot], ks.parity);
                    __syncwarp();  // every lane has seen this phase before the producer may begin the next
                    if (lane == 0) mbarrier_arrive(&sh.k_empty[ks.slot]);
                    ks.advance();
                    if (TURNS) {
                        named_barrier_sync(1 + w, 256);
                        named_barrier_arrive(1 + (w + 1) % W, 256);
                    }
                    mbarrier_wait(&sh.v_full[vs.slot], vs.parity);
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(&sh.v_empty[vs.slot]);
                    vs.advance();
                }
            };
            pass(own.end > own.begin ? n.end - own.end : n.end - n.begin);
            if (own.end > own.begin) {
                float s[BN / 2] = {}, fix[2];
                Fragment<BN> pr;
                auto softmax = [&](int j) {
                    if (j >= own.clear_hi || j < own.clear_lo) mask<BN>(s, j * BN, span0, span1);
                    run.step<BN>(s, c, fix);
                };
                auto free_k = [&] {
                    if (lane == 0) mbarrier_arrive(&sh.k_empty[ks.slot]);
                    ks.advance();
                };
                auto free_v = [&] {
                    if (lane == 0) mbarrier_arrive(&sh.v_empty[vs.slot]);
                    vs.advance();
                };

                int j = own.end - 1;
                mbarrier_wait(&sh.k_full[ks.slot], ks.parity);
                if (TURNS) named_barrier_sync(1 + w, 256);
                wgmma_fence();
                mma_abt<BN, WIDTH>(s, q, sh.k[ks.slot]);
                wgmma_commit();
                if (TURNS) named_barrier_arrive(1 + (w + 1) % W, 256);
                free_q();
                wgmma_wait<0>();
                pin_registers(s);
                free_k();
                softmax(j);
                to_bf16<BN>(pr, s);

                for (--j; j >= own.begin; --j) {
                    mbarrier_wait(&sh.k_full[ks.slot], ks.parity);
                    if (TURNS) named_barrier_sync(1 + w, 256);
                    wgmma_fence();
                    mma_abt<BN, WIDTH>(s, q, sh.k[ks.slot]);
                    wgmma_commit();
                    mbarrier_wait(&sh.v_full[vs.slot], vs.parity);
                    wgmma_fence();
                    mma_pb<D, BN>(o, pr, sh.v[vs.slot], 1);
                    wgmma_commit();
                    if (TURNS) named_barrier_arrive(1 + (w + 1) % W, 256);
                    wgmma_wait<1>();
                    pin_registers(s);
                    free_k();
                    softmax(j);
                    pin_registers(s);
                    keep_order(j);
                    wgmma_wait<0>();
                    pin_registers(o);
                    pin_registers(pr);
                    free_v();
#pragma unroll
                    for (int i = 0; i < D / 2; ++i) o[i] *= fix[i / 2 % 2];
                    to_bf16<BN>(pr, s);
                }
                mbarrier_wait(&sh.v_full[vs.slot], vs.parity);
                wgmma_fence();
                mma_pb<D, BN>(o, pr, sh.v[vs.slot], 1);
                wgmma_commit();
                wgmma_wait<0>();
                pin_registers(o);
                free_v();
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    run.sum[i] += __shfl_xor_sync(~0u, run.sum[i], 1);
                    run.sum[i] += __shfl_xor_sync(~0u, run.sum[i], 2);
                }
                pass(own.begin - n.begin);
            } else {
                free_q();
            }

            // Rows that see no key: output 0, log-sum-exp -inf. NaN stays NaN.
            const bool none0 = run.sum[0] == 0.f, none1 = run.sum[1] == 0.f;
            if (lane % 4 == 0) {
                float* out = p.lse + (long)tile.head * p.Sq;
                if (row < p.Sq) out[row] = none0 ? -infinity() : fmaf(run.max[0], p.scale, log2_approx(run.sum[0]) * LN_2);
                if (row + 8 < p.Sq) out[row + 8] = none1 ? -infinity() : fmaf(run.max[1], p.scale, log2_approx(run.sum[1]) * LN_2);
            }
            named_barrier_sync(8 + w, 128);
            stage<D>(q, o, none0 ? 0.f : 1.f / run.sum[0], none1 ? 0.f : 1.f / run.sum[1]);
            fence_async_shared();
            named_barrier_sync(8 + w, 128);
            if (threadIdx.x % 128 == 0) {
                store_rows<D>(map_o, q, m0 + 64 * w, h, b);
                tma_store_commit();
            }
            stored = true;
            qs.advance();
        }
        if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
    }
}

}  // namespace attn

#define FORWARD(D, W, BN, STAGES)                                                                                             \
    extern "C" __global__ __launch_bounds__(128 * (W + 1), 1) void attn_fwd_d##D##_w##W##_n##BN(                               \
        const __grid_constant__ ptx::TensorMap q, const __grid_constant__ ptx::TensorMap k,                                    \
        const __grid_constant__ ptx::TensorMap v, const __grid_constant__ ptx::TensorMap o, const __grid_constant__ attn::Params p) { \
        attn::forward<(D + 63) / 64 * 64, W, BN, STAGES, true, D>(&q, &k, &v, &o, p);                                          \
    }
#if ATTN_WIDTH == 96
FORWARD(96, 2, 128, 2)
#else
FORWARD(128, 2, 128, 2)
FORWARD(64, 3, 128, 4)
FORWARD(64, 4, 64, 6)
#endif
