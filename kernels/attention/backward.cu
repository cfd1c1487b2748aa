// Flash attention backward in two passes, Hopper. bf16 in and out, fp32 accumulation, deterministic without atomics on data.
// (one_pass.cu makes the same in one at head dim 64, where flash.py chooses it.)
//
// Two launches: dq (a tile of query rows walks the keys; it also makes rowsum(dO * O) and leaves it, with the log-sum-exp in base 2, in
// the workspace) and dkv (a tile of key rows walks the queries, over all query heads of its group). The logits and dP are computed
// twice, 7 products instead of 5; in exchange both passes keep P and dS in registers, never write fp32 gradients to memory, need no
// order between blocks, and dK, dV of grouped heads are summed in registers.
//
// Tiles are handed out by a counter, longest first. Warpgroup 0 is the producer (one thread issues all copies); warpgroups 1 and 2 are
// consumers with 64 rows each. Registers: 168 at entry, then 40 / 232, in dkv d128 24 / 240.
//   variant           tile             rows, stages       shared memory                               accumulators per thread
//   dq   d128 w2 n128 128 q x 128 k    1 place, 3 K, 2 V  Q 32K + dO 32K + K 96K + V 64K = 224K       S 64, dP 64, dQ 64, dS 32
//   dq   d96  w2 n128 as d128: columns 96 .. 127 are zeros; S and dP leave them out, dQ has them (ATTN_WIDTH=96, a file of its own)
//   dq   d64  w2 n128 128 q x 128 k    2 places, 4 K, 4 V Q 32K + dO 32K + K 64K + V 64K = 192K       64, 64, 32, 32
//   dkv  d128 w2 n64  128 k x 64 q     2 places, 3 stages K 64K + V 64K + Q 48K + dO 48K = 224K       S 32, dP 32, dK 64, dV 64, P, dS 16
//   dkv  d96  w2 n64  as d128, likewise
//   dkv  d64  w2 n64  128 k x 64 q     2 places, 4 stages K 32K + V 32K + Q 32K + dO 32K = 128K       32, 32, 32, 32, 16, 16
//   dkv  d64  w2 n96  128 k x 96 q     2 places, 4 stages K 32K + V 32K + Q 48K + dO 48K = 160K       48, 48, 32, 32, 24, 24
// plus 1 KB to align, less than 512 bytes of barriers, and in dkv two floats per query and stage.
//
// dq, per key block: S = Q K^T is issued behind the dQ product of the block before; when that has retired, dP = dO V^T; P = exp2(S - lse)
// runs under dP; dS = P (dP - delta) is packed and is the register operand of dQ += dS K.
// dkv, per query block: S^T = K Q^T is issued behind the dV and dK products of the block before; when those have retired, dP^T = V dO^T;
// P^T is made under it, packed, and dV += P^T dO issued; dS^T is made under that; dK += dS^T Q.
// A consumer skips blocks that only its neighbour's rows can see.
//
// Barriers, and why each is enough:
//   dq row_full[s][w], dkv kv_full[s]     copy engine -> consumers: the rows that stay (Q and dO; K and V).
//   dq row_empty[s][w], dkv kv_empty[s]   one thread per consumer -> producer, after the outputs staged there (dQ over Q; dK over K, dV
//                                         over V) have been read. With two places it arrives in the next tile, which has its own place.
//   dq k_full, v_full; dkv q_full, g_full copy engine -> consumers: the blocks that pass (in dkv with their lse2, delta).
//   dq k_empty, v_empty                   one lane per consumer warp (4 W arrivals), after the wait that retires the last product
//                                         reading the block.
//   dkv empty                             the same, but every lane (128 W arrivals), after dK, later than dV: lse2 and delta of the block
//                                         are read by ordinary loads, and each lane lets go of what it has read itself. (An arrival of
//                                         one lane behind __syncwarp would do, but racecheck, compute-sanitizer 2025.3, takes an
//                                         arrival to order the accesses of its own thread alone, and reports the other lanes' reads.)
//   held                                  a block is let go one round late (in the shadow of the next S). So a consumer that skips a
//                                         block first lets go of what it holds, or producer and consumer would wait for each other.
//   named 8+w                             the 128 threads of consumer w: products on the rows retired before they are overwritten;
//                                         outputs in shared memory, fenced for the copy engine by their writers, before the store.
//   queue                                 see Queue in parts.cuh.
// The workspace written by dq is read by dkv: two launches on one stream.
// Each output element is summed by one thread in a fixed order; no block reads what another wrote within a launch.
#include "parts.cuh"

namespace attn {

// ---------------------------------------------------------------- dQ

template <int D, int W, int BN, int ROWS, int KS, int VS>
struct DqShared {
    static constexpr int Q = 64 * D * 2, K = BN * D * 2;
    uint8_t q[ROWS][W][Q], g[ROWS][W][Q], k[KS][K], v[VS][K];
    mbarrier_t row_full[ROWS][W], row_empty[ROWS][W], k_full[KS], k_empty[KS], v_full[VS], v_empty[VS];
    Queue queue;
};

// D: columns of the tiles, a multiple of 64. WIDTH: those of a head; the copy engine fills the rest with zeros and does not store it.
template <int D, int W, int BN, int ROWS, int KS, int VS, int WIDTH>
__device__ __forceinline__ void dq_pass(const TensorMap* map_q, const TensorMap* map_k, const TensorMap* map_v, const TensorMap* map_g,
                                        const TensorMap* map_dq, const uint16_t* o, Strides so, const Params& p) {
    using Shared = DqShared<D, W, BN, ROWS, KS, VS>;
    extern __shared__ uint8_t raw[];
    Shared& sh = *reinterpret_cast<Shared*>(raw + ((1024 - (smem_address(raw) & 1023)) & 1023));
    const int wg = warp_index() / 4;

    if (threadIdx.x == 0) {
        for (int w = 0; w < W; ++w) {
            for (int s = 0; s < ROWS; ++s) {
                mbarrier_init(&sh.row_full[s][w], 1);
                mbarrier_init(&sh.row_empty[s][w], 1);
            }
        }
        for (int s = 0; s < KS; ++s) {
            mbarrier_init(&sh.k_full[s], 1);
            mbarrier_init(&sh.k_empty[s], 4 * W);
        }
        for (int s = 0; s < VS; ++s) {
            mbarrier_init(&sh.v_full[s], 1);
            mbarrier_init(&sh.v_empty[s], 4 * W);
        }
        sh.queue.init(4 * W);
        mbarrier_init_fence();
    }
    __syncthreads();

    const int nblocks = (p.Sq + 64 * W - 1) / (64 * W), nheads = p.B * p.H, tiles = nblocks * nheads;
    const bool reversed = p.right < UNBOUNDED;

    if (wg == 0) {
        registers_decrease<(W == 3 ? 32 : 40)>();
        if (threadIdx.x == 0) {
            tma_prefetch_map(map_q);
            tma_prefetch_map(map_k);
            tma_prefetch_map(map_v);
            tma_prefetch_map(map_g);
            RingState<KS> ks(1);
            RingState<VS> vs(1);
            RingState<ROWS> rs(1);
            RingState<2> slot(1);
            int t = blockIdx.x;
            for (sh.queue.give(slot, t); t < tiles; sh.queue.give(slot, t)) {
                const Tile tile = tile_at(t, nblocks, nheads, p.section, reversed);
                const int b = tile.head / p.H, h = tile.head - b * p.H, hk = h / (p.H / p.Hkv), m0 = tile.block * 64 * W;
                const Blocks n = blocks<BN>(keys_of(p, b, m0), keys_of(p, b, m0 + 64 * W - 1));
                for (int j = n.end - 1, first = 1; j >= n.begin || first; --j, first = 0) {
                    if (j >= n.begin) {
                        mbarrier_wait(&sh.k_empty[ks.slot], ks.parity);
                        mbarrier_arrive_expect(&sh.k_full[ks.slot], Shared::K);
                        load_rows<BN, D>(sh.k[ks.slot], map_k, &sh.k_full[ks.slot], j * BN, hk, b);
                        ks.advance();
                    }
                    if (first) {
                        for (int w = 0; w < W; ++w) {
                            mbarrier_wait(&sh.row_empty[rs.slot][w], rs.parity);
                            mbarrier_arrive_expect(&sh.row_full[rs.slot][w], 2 * Shared::Q);
                            load_rows<64, D>(sh.q[rs.slot][w], map_q, &sh.row_full[rs.slot][w], m0 + 64 * w, h, b);
                            load_rows<64, D>(sh.g[rs.slot][w], map_g, &sh.row_full[rs.slot][w], m0 + 64 * w, h, b);
                        }
                        rs.advance();
                    }
                    if (j >= n.begin) {
                        mbarrier_wait(&sh.v_empty[vs.slot], vs.parity);
                        mbarrier_arrive_expect(&sh.v_full[vs.slot], Shared::K);
                        load_rows<BN, D>(sh.v[vs.slot], map_v, &sh.v_full[vs.slot], j * BN, hk, b);
                        vs.advance();
                    }
                }
                t = Queue::draw(p.queue);
            }
            Queue::leave(p.queue);
        }
    } else {
        registers_increase<(W == 3 ? 160 : 232)>();
        const int w = wg - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        const float c = p.scale * LOG2_E;
        RingState<KS> ks(0);
        RingState<VS> vs(0);
        RingState<ROWS> rs(0);
        bool stored = false;
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
            auto pass = [&](int count) {  // blocks that only other warpgroups need
                for (int i = 0; i < count; ++i) {
                    mbarrier_wait(&sh.k_full[ks.slot], ks.parity);
                    __syncwarp();  // every lane has seen this phase before the producer may begin the next
                    if (lane == 0) mbarrier_arrive(&sh.k_empty[ks.slot]);
                    ks.advance();
                    mbarrier_wait(&sh.v_full[vs.slot], vs.parity);
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(&sh.v_empty[vs.slot]);
                    vs.advance();
                }
            };

            uint8_t *q = sh.q[rs.slot][w], *g = sh.g[rs.slot][w];

            // rowsum(dO * O): O from global memory, dO from the tile; four lanes a row, the same rows that the fragments hold
            float lse0, lse1, delta0, delta1;
            {
                uint4 x[2][WIDTH / 32];
                const uint16_t* from = o + b * so.b + h * so.h + lane % 4 * 8;
#pragma unroll
                for (int r = 0; r < 2; ++r)
#pragma unroll
                    for (int i = 0; i < WIDTH / 32; ++i)
                        x[r][i] = row + 8 * r < p.Sq ? *reinterpret_cast<const uint4*>(from + (row + 8 * r) * so.s + 32 * i) : uint4{};
                const long head = (long)tile.head * p.Sq;
                lse0 = row < p.Sq ? p.lse[head + row] * LOG2_E : -infinity();
                lse1 = row + 8 < p.Sq ? p.lse[head + row + 8] * LOG2_E : -infinity();
                if (lse0 == -infinity()) lse0 = infinity();  // no key is visible: every P becomes 0
                if (lse1 == -infinity()) lse1 = infinity();
                mbarrier_wait(&sh.row_full[rs.slot][w], rs.parity);
                if (stored && threadIdx.x % 128 == 0) {  // the other place, once the output staged there has been read
                    tma_store_wait_read<0>();
                    mbarrier_arrive(&sh.row_empty[rs.slot ^ 1][w]);
                }
                float sum[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    sum[r] = 0.f;
#pragma unroll
                    for (int i = 0; i < WIDTH / 32; ++i) {
                        const uint4 y = *reinterpret_cast<const uint4*>(
                            g + i / 2 * 64 * 128 + swizzle_128(16 * warp + lane / 4 + 8 * r, i % 2 * 64 + lane % 4 * 16));
                        sum[r] = dot8(x[r][i], y, sum[r]);
                    }
                    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
                    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
                }
                delta0 = sum[0];
                delta1 = sum[1];
                const long at = (long)tile.head * p.Spad;
                if (lane % 4 == 0 && row < p.Spad) {
                    p.lse2[at + row] = lse0;
                    p.delta[at + row] = delta0;
                }
                if (lane % 4 == 0 && row + 8 < p.Spad) {
                    p.lse2[at + row + 8] = lse1;
                    p.delta[at + row + 8] = delta1;
                }
                if (tile.block == nblocks - 1)  // the rest of the workspace's rows
                    for (int r = nblocks * 64 * W + threadIdx.x - 128; r < p.Spad; r += 128 * W) {
                        p.lse2[at + r] = infinity();
                        p.delta[at + r] = 0.f;
                    }
            }

            float dq[D / 2] = {}, s[BN / 2] = {}, dp[BN / 2] = {};
            Fragment<BN> ds = {};
            uint32_t held = 0;  // ring slot of the block whose dQ product is running
            bool busy = false;
            pass(own.end > own.begin ? n.end - own.end : n.end - n.begin);
            for (int j = own.end - 1; j >= own.begin; --j) {
                mbarrier_wait(&sh.k_full[ks.slot], ks.parity);
                wgmma_fence();
                mma_abt<BN, WIDTH>(s, q, sh.k[ks.slot]);
                wgmma_commit();
                wgmma_wait<1>();  // the dQ product of the block before
                pin_registers(ds);
                if (busy && lane == 0) mbarrier_arrive(&sh.k_empty[held]);
                mbarrier_wait(&sh.v_full[vs.slot], vs.parity);
                wgmma_fence();
                mma_abt<BN, WIDTH>(dp, g, sh.v[vs.slot]);
                wgmma_commit();
                wgmma_wait<1>();
                pin_registers(s);
                if (j >= own.clear_hi || j < own.clear_lo) mask<BN>(s, j * BN, span0, span1);
#pragma unroll
                for (int i = 0; i < BN / 2; ++i) s[i] = exp2_approx(fmaf(s[i], c, i / 2 % 2 ? -lse1 : -lse0));
                pin_registers(s);
                keep_order(j);
                wgmma_wait<0>();
                pin_registers(dp);
                if (lane == 0) mbarrier_arrive(&sh.v_empty[vs.slot]);
                vs.advance();
#pragma unroll
                for (int i = 0; i < BN / 2; ++i) s[i] *= dp[i] - (i / 2 % 2 ? delta1 : delta0);
                to_bf16<BN>(ds, s);
                wgmma_fence();
                mma_pb<D, BN>(dq, ds, sh.k[ks.slot], 1);
                wgmma_commit();
                held = ks.slot;
                ks.advance();
                busy = true;
            }
            wgmma_wait<0>();
            pin_registers(dq);
            if (busy && lane == 0) mbarrier_arrive(&sh.k_empty[held]);
            if (busy) pass(own.begin - n.begin);
            named_barrier_sync(8 + w, 128);
            stage<D>(q, dq, p.scale, p.scale);
            fence_async_shared();
            named_barrier_sync(8 + w, 128);
            if (threadIdx.x % 128 == 0) {
                store_rows<D>(map_dq, q, m0 + 64 * w, h, b);
                tma_store_commit();
                if (ROWS == 1) {
                    tma_store_wait_read<0>();
                    mbarrier_arrive(&sh.row_empty[0][w]);
                }
            }
            stored = ROWS == 2;
            rs.advance();
        }
        if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
    }
}

// ---------------------------------------------------------------- dK, dV

template <int D, int W, int BQ, int KVS, int STAGES>
struct DkvShared {
    static constexpr int K = 64 * D * 2, Q = BQ * D * 2;
    uint8_t k[KVS][W][K], v[KVS][W][K], q[STAGES][Q], g[STAGES][Q];
    alignas(128) float lse2[STAGES][BQ];
    alignas(128) float delta[STAGES][BQ];
    mbarrier_t kv_full[KVS], kv_empty[KVS], q_full[STAGES], g_full[STAGES], empty[STAGES];
    Queue queue;
};

template <int D, int W, int BQ, int KVS, int STAGES, int WIDTH>
__device__ __forceinline__ void dkv_pass(const TensorMap* map_q, const TensorMap* map_k, const TensorMap* map_v, const TensorMap* map_g,
                                         const TensorMap* map_dk, const TensorMap* map_dv, const Params& p) {
    using Shared = DkvShared<D, W, BQ, KVS, STAGES>;
    extern __shared__ uint8_t raw[];
    Shared& sh = *reinterpret_cast<Shared*>(raw + ((1024 - (smem_address(raw) & 1023)) & 1023));
    const int wg = warp_index() / 4;

    if (threadIdx.x == 0) {
        for (int s = 0; s < KVS; ++s) {
            mbarrier_init(&sh.kv_full[s], 1);
            mbarrier_init(&sh.kv_empty[s], W);
        }
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(&sh.q_full[s], 1);
            mbarrier_init(&sh.g_full[s], 1);
            mbarrier_init(&sh.empty[s], 128 * W);
        }
        sh.queue.init(4 * W);
        mbarrier_init_fence();
    }
    __syncthreads();


    if (wg == 0) {
        registers_decrease<(W == 3 ? 32 : D == 128 ? 24 : 40)>();
        if (threadIdx.x == 0) {
            tma_prefetch_map(map_q);
            tma_prefetch_map(map_k);
            tma_prefetch_map(map_v);
            tma_prefetch_map(map_g);
            const int nblocks = (p.Sk + 64 * W - 1) / (64 * W), nheads = p.B * p.Hkv, tiles = nblocks * nheads, group = p.H / p.Hkv;
            RingState<STAGES> qs(1);
            RingState<2> slot(1);
            int t = blockIdx.x;
            for (sh.queue.give(slot, t); t < tiles; sh.queue.give(slot, t)) {
                const Tile tile = tile_at(t, nblocks, nheads, p.section, false);
                const int b = tile.head / p.Hkv, hk = tile.head - b * p.Hkv, n0 = tile.block * 64 * W;
                const Blocks m = blocks<BQ>(queries_of(p, b, n0), queries_of(p, b, n0 + 64 * W - 1));
                {  // K and V have as many places as the queue and go round with it; the queue is one step ahead
                    static_assert(KVS == 2, "one place per queue slot");
                    const uint32_t kv = slot.slot ^ 1;
                    mbarrier_wait(&sh.kv_empty[kv], slot.parity ^ kv);
                    mbarrier_arrive_expect(&sh.kv_full[kv], 2 * W * Shared::K);
                    for (int w = 0; w < W; ++w) {
                        load_rows<64, D>(sh.k[kv][w], map_k, &sh.kv_full[kv], n0 + 64 * w, hk, b);
                        load_rows<64, D>(sh.v[kv][w], map_v, &sh.kv_full[kv], n0 + 64 * w, hk, b);
                    }
                }
                const int last = m.begin < m.end ? (hk + 1) * group : 0;
#pragma unroll 1
                for (int h = hk * group; h < last; ++h)
#pragma unroll 1
                    for (int i = m.begin; i < m.end; ++i) {
                        const uint32_t at = static_cast<uint32_t>(b * p.H + h) * p.Spad + i * BQ;
                        mbarrier_wait(&sh.empty[qs.slot], qs.parity);
                        mbarrier_arrive_expect(&sh.q_full[qs.slot], Shared::Q + BQ * 4);
                        load_rows<BQ, D>(sh.q[qs.slot], map_q, &sh.q_full[qs.slot], i * BQ, h, b);
                        bulk_load(sh.lse2[qs.slot], p.lse2 + at, BQ * 4, &sh.q_full[qs.slot]);
                        mbarrier_arrive_expect(&sh.g_full[qs.slot], Shared::Q + BQ * 4);
                        load_rows<BQ, D>(sh.g[qs.slot], map_g, &sh.g_full[qs.slot], i * BQ, h, b);
                        bulk_load(sh.delta[qs.slot], p.delta + at, BQ * 4, &sh.g_full[qs.slot]);
                        qs.advance();
                    }
                t = Queue::draw(p.queue);
            }
            Queue::leave(p.queue);
        }
    } else {
        registers_increase<(W == 3 ? 160 : D == 128 ? 240 : 232)>();
        const int w = wg - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        const int nblocks = (p.Sk + 64 * W - 1) / (64 * W), nheads = p.B * p.Hkv, tiles = nblocks * nheads, group = p.H / p.Hkv;
        const float c = p.scale * LOG2_E;
        RingState<STAGES> qs(0);
        RingState<KVS> kv(0);
        bool stored = false;
        RingState<2> slot(0);
        for (int t = sh.queue.take(slot); t < tiles; t = sh.queue.take(slot)) {
            const Tile tile = tile_at(t, nblocks, nheads, p.section, false);
            const int b = tile.head / p.Hkv, hk = tile.head - b * p.Hkv, n0 = tile.block * 64 * W;
            const Blocks m = blocks<BQ>(queries_of(p, b, n0), queries_of(p, b, n0 + 64 * W - 1));
            const int row = n0 + 64 * w + 16 * warp + lane / 4;
            const Span span0 = queries_of(p, b, row), span1 = queries_of(p, b, row + 8);
            Blocks own = blocks<BQ>(queries_of(p, b, n0 + 64 * w), queries_of(p, b, n0 + 64 * w + 63));
            if (n0 + 64 * w >= p.Sk) own.end = own.begin;
            uint8_t *k = sh.k[kv.slot][w], *v = sh.v[kv.slot][w];

            float dk[D / 2] = {}, dv[D / 2] = {}, s[BQ / 2] = {}, dp[BQ / 2] = {};
            Fragment<BQ> pr = {}, ds = {};
            uint32_t held = 0;
            mbarrier_wait(&sh.kv_full[kv.slot], kv.parity);
            if (stored && threadIdx.x % 128 == 0) {  // the other place, once the outputs staged there have been read
                tma_store_wait_read<0>();
                mbarrier_arrive(&sh.kv_empty[kv.slot ^ 1]);
            }
            bool busy = false;
            for (int g = 0; g < group; ++g)
                for (int i = m.begin; i < m.end; ++i) {
                    if (i < own.begin || i >= own.end) {  // a block that only other warpgroups need
                        if (busy) {  // the producer may need the place that is still held before it can fill the next
                            wgmma_wait<0>();
                            mbarrier_arrive(&sh.empty[held]);
                            busy = false;
                        }
                        mbarrier_wait(&sh.q_full[qs.slot], qs.parity);
                        mbarrier_wait(&sh.g_full[qs.slot], qs.parity);
                        mbarrier_arrive(&sh.empty[qs.slot]);
                        qs.advance();
                        continue;
                    }
                    mbarrier_wait(&sh.q_full[qs.slot], qs.parity);
                    wgmma_fence();
                    mma_abt<BQ, WIDTH>(s, k, sh.q[qs.slot]);
                    wgmma_commit();
                    wgmma_wait<1>();  // the dV and dK products of the block before
                    pin_registers(pr);
                    pin_registers(ds);
                    if (busy) mbarrier_arrive(&sh.empty[held]);
                    mbarrier_wait(&sh.g_full[qs.slot], qs.parity);
                    wgmma_fence();
                    mma_abt<BQ, WIDTH>(dp, v, sh.g[qs.slot]);
                    wgmma_commit();
                    const float2* lse2 = reinterpret_cast<const float2*>(sh.lse2[qs.slot]) + lane % 4;
                    const float2* delta = reinterpret_cast<const float2*>(sh.delta[qs.slot]) + lane % 4;
                    float shift[BQ / 4];  // loaded here so that the latency is over when the logits are there
#pragma unroll
                    for (int j = 0; j < BQ / 8; ++j) {
                        const float2 l = lse2[4 * j];
                        shift[2 * j] = -l.x;
                        shift[2 * j + 1] = -l.y;
                    }
                    pin_registers(shift);
                    keep_order(i);
                    wgmma_wait<1>();
                    pin_registers(s);
                    if (i >= own.clear_hi || i < own.clear_lo) mask<BQ>(s, i * BQ, span0, span1);
#pragma unroll
                    for (int j = 0; j < BQ / 8; ++j) {
                        s[4 * j] = exp2_approx(fmaf(s[4 * j], c, shift[2 * j]));
                        s[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], c, shift[2 * j + 1]));
                        s[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], c, shift[2 * j]));
                        s[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], c, shift[2 * j + 1]));
                    }
                    to_bf16<BQ>(pr, s);
                    wgmma_fence();
                    mma_pb<D, BQ>(dv, pr, sh.g[qs.slot], 1);
                    wgmma_commit();
                    wgmma_wait<1>();
                    pin_registers(dp);
#pragma unroll
                    for (int j = 0; j < BQ / 8; ++j) {
                        const float2 d = delta[4 * j];
                        s[4 * j] *= dp[4 * j] - d.x;
                        s[4 * j + 1] *= dp[4 * j + 1] - d.y;
                        s[4 * j + 2] *= dp[4 * j + 2] - d.x;
                        s[4 * j + 3] *= dp[4 * j + 3] - d.y;
                    }
                    to_bf16<BQ>(ds, s);
                    wgmma_fence();
                    mma_pb<D, BQ>(dk, ds, sh.q[qs.slot], 1);
                    wgmma_commit();
                    held = qs.slot;
                    qs.advance();
                    busy = true;
                }
            wgmma_wait<0>();
            pin_registers(dk);
            pin_registers(dv);
            if (busy) mbarrier_arrive(&sh.empty[held]);
            named_barrier_sync(8 + w, 128);
            stage<D>(v, dv, 1.f, 1.f);
            stage<D>(k, dk, p.scale, p.scale);
            fence_async_shared();
            named_barrier_sync(8 + w, 128);
            if (threadIdx.x % 128 == 0) {
                store_rows<D>(map_dv, v, n0 + 64 * w, hk, b);
                store_rows<D>(map_dk, k, n0 + 64 * w, hk, b);
                tma_store_commit();
            }
            stored = true;
            kv.advance();
        }
        if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
    }
}

}  // namespace attn

#define MAP(name) const __grid_constant__ ptx::TensorMap name
#define DQ(D, W, BN, ROWS, KS, VS)                                                                                               \
    extern "C" __global__ __launch_bounds__(128 * (W + 1), 1) void attn_bwd_dq_d##D##_w##W##_n##BN(                         \
        MAP(q), MAP(k), MAP(v), MAP(g), MAP(dq), const uint16_t* o, const attn::Strides so,                                  \
        const __grid_constant__ attn::Params p) {                                                                          \
        attn::dq_pass<(D + 63) / 64 * 64, W, BN, ROWS, KS, VS, D>(&q, &k, &v, &g, &dq, o, so, p);                            \
    }
#define DKV(D, W, BQ, KVS, STAGES)                                                                                         \
    extern "C" __global__ __launch_bounds__(128 * (W + 1), 1) void attn_bwd_dkv_d##D##_w##W##_n##BQ(                        \
        MAP(q), MAP(k), MAP(v), MAP(g), MAP(dk), MAP(dv), const __grid_constant__ attn::Params p) {                          \
        attn::dkv_pass<(D + 63) / 64 * 64, W, BQ, KVS, STAGES, D>(&q, &k, &v, &g, &dk, &dv, p);                              \
    }
#if ATTN_WIDTH == 96
DQ(96, 2, 128, 1, 3, 2)
DKV(96, 2, 64, 2, 3)
#else
DQ(128, 2, 128, 1, 3, 2)
DQ(64, 2, 128, 2, 4, 4)
DKV(128, 2, 64, 2, 3)
DKV(64, 2, 64, 2, 4)
DKV(64, 2, 96, 2, 4)
#endif
