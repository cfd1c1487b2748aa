// Flash attention backward in one pass, Hopper, head dim 64, no documents. bf16 in and out, fp32 accumulation. 5 products a pair of blocks where the
// passes of backward.cu make 7; in exchange dQ is summed across CTAs, in a fixed order.
//
// Two launches: attn_bwd_delta_d64 makes what a query contributes by itself (its log-sum-exp in base 2, rowsum(dO * O)) and puts the turns
// back to zero; attn_bwd_one_d64 does the rest.
//
// The order of its sums, and why nothing waits for ever: turns.cuh. The first item of a CTA is drawn too, never taken from its index: a CTA
// that cannot start yet, because others hold its multiprocessor, would keep an item that those that run wait for.
//
// An item walks its blocks of queries last first, so that one that starts later finds its turns given; inside a block it walks the query
// heads of the group. It leaves dK and dV, summed in registers, and its share of each block's dQ. The first of a block's order stores, those
// between add (red.v4.f32, alone on their addresses until they give the turn on), the last takes the sum as its accumulator, adds its own,
// scales, rounds and writes dQ. Sums under way lie in the accumulator's own layout: 16 bytes a thread, 512 bytes a warp, nothing is staged.
// They stay in L2.
//
// Roles of the 512 threads (registers: 128 at entry, then 40 / 192, 192 / 88):
//   warpgroup 0      warp 0 copies, warp 1 waits for turns ahead of dQ, warp 2 gives them on; one lane each.
//   warpgroups 1, 2  64 keys each, as dkv of backward.cu: S^T = K Q^T, dP^T = V dO^T (V in registers: a product with both operands in shared
//                    memory reads it at the rate of the tensor cores), dV += P^T dO, dK += dS^T Q; dS^T goes to shared memory as well.
//   warpgroup 3      dQ = dS K over all 128 keys, then into `partial`.
//
// Shared memory: K, V 2 places 64K, Q, dO 4 stages 64K, dS 4 x 16K = 64K, dK 16K, dQ 8K = 216K, plus 2 floats per query and stage,
// barriers, and 1 KB to align.
//
// Barriers, and why each is enough:
//   kv_full     copy engine -> consumers and dQ.
//   kv_empty    4 dQ warps, after the last product that reads K; one thread per consumer, in its next item, after dV, staged over V, and dK
//               have been read.
//   q_full, g_full, empty   as in dkv of backward.cu.
//   ds_full     8 consumer warps, dS written and fenced for the matrix instruction -> dQ.
//   ds_empty    4 dQ warps, after the wait that retires the product -> consumers.
//   turn_full   the waiter has acquired the turn -> dQ: what the CTAs before have added is visible to it.
//   turn_empty  4 dQ warps -> waiter.
//   done_full   4 dQ warps, after their accesses to `partial` -> giver, whose release covers them.
//   done_empty  giver -> dQ.
//   named 8+w   the 128 threads of consumer w, as in dkv of backward.cu. named 10: those of dQ, around its staged output.
//   queue       see Queue in parts.cuh; taken by the 12 warps and, alone, by waiter and giver.
#include "parts.cuh"
#include "turns.cuh"

namespace attn {

namespace one_pass {

constexpr int D = 64, W = 2, STAGES = 4, DS = 4, TURNS = 4, DONE = 4, TILE = 64 * 64 * 2;
static_assert(KEYS == 64 * W, "64 keys a consumer");

// ---------------------------------------------------------------- what a query contributes by itself

constexpr int ROWS = 4, LANES = D / 8, THREADS = 256;  // rows a lane, lanes a row: a lane has 8 columns

// lse2 and delta of 128 rows a CTA, numbered (batch, position, head) as they lie in memory. Positions beyond the queries are neutral.
// dQ of blocks that see no key becomes zero: no item comes to them.
__device__ __forceinline__ void delta(const uint16_t* o, Strides so, const uint16_t* g, Strides sg, uint16_t* dq, Strides sdq, const Params& p,
                                      const Sums& u) {
    const int turns = u.ring * (p.H / p.Hkv) * u.mblocks;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < turns; i += gridDim.x * THREADS) u.turn[i] = 0;

    const int part = threadIdx.x % LANES * 8, padded = u.mblocks * BQ;
    const int first = blockIdx.x * (THREADS / LANES * ROWS) + threadIdx.x / LANES;
    int b[ROWS], s[ROWS], h[ROWS];
    uint4 x[ROWS], y[ROWS];
    float lse[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = first + THREADS / LANES * r, bs = row / p.H;
        h[r] = row - bs * p.H;
        b[r] = bs / padded;
        s[r] = bs - b[r] * padded;
        const bool in = b[r] < p.B && s[r] < p.Sq;
        x[r] = in ? *reinterpret_cast<const uint4*>(o + b[r] * so.b + s[r] * so.s + h[r] * so.h + part) : uint4{};
        y[r] = in ? *reinterpret_cast<const uint4*>(g + b[r] * sg.b + s[r] * sg.s + h[r] * sg.h + part) : uint4{};
        lse[r] = in ? p.lse[static_cast<long>(b[r] * p.H + h[r]) * p.Sq + s[r]] * LOG2_E : -infinity();
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float sum = dot8(x[r], y[r], 0.f);
#pragma unroll
        for (int i = 1; i < LANES; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
        if (b[r] >= p.B) continue;
        const int block = s[r] / BQ * BQ;
        if (s[r] < p.Sq && keys_of(p, b[r], block).lo > keys_of(p, b[r], block + BQ - 1).hi)
            *reinterpret_cast<uint4*>(dq + b[r] * sdq.b + s[r] * sdq.s + h[r] * sdq.h + part) = uint4{};
        if (part == 0) {
            const long at = static_cast<long>(b[r] * p.H + h[r]) * p.Spad + s[r];
            p.lse2[at] = lse[r] == -infinity() ? infinity() : lse[r];  // no key is visible: every P becomes 0
            p.delta[at] = sum;
        }
    }
}

// ---------------------------------------------------------------- the pass

struct Shared {
    uint8_t k[2][W][TILE], v[2][W][TILE], q[STAGES][TILE], g[STAGES][TILE], ds[DS][W][TILE], dk[W][TILE], dq[TILE];
    alignas(128) float lse2[STAGES][BQ];
    alignas(128) float delta[STAGES][BQ];
    mbarrier_t kv_full[2], kv_empty[2], q_full[STAGES], g_full[STAGES], empty[STAGES], ds_full[DS], ds_empty[DS];
    mbarrier_t turn_full[TURNS], turn_empty[TURNS], done_full[DONE], done_empty[DONE];
    Queue queue;
};

static_assert(sizeof(Shared) <= 223744, "what flash.py asks for, less 1024 to align");

__device__ __forceinline__ int load_acquire(const int* at) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
__device__ __forceinline__ void add_release(int* at, int x) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
// Four neighbours of `partial`, past L1, which other CTAs do not see.
__device__ __forceinline__ void store4(float* at, const float* x) {
    asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
__device__ __forceinline__ void add4(float* at, const float* x) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
__device__ __forceinline__ void load4(float* x, const float* at) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "l"(at) : "memory");
}

// d = A B^T over D columns, as mma_abt, with A as fragments.
__device__ __forceinline__ void mma_rbt(float (&d)[BQ / 2], const Fragment<D>& a, const uint8_t* b) {
    const uint64_t db = descriptor_k_major(smem_address(b));
#pragma unroll
    for (int k = 0; k < D / 16; ++k) wgmma_rs<BQ, 0>(d, a[k], descriptor_advance(db, k * 32), k > 0);
}

// One thread. `t`: its first item.
__device__ __forceinline__ void copies(Shared& sh, const TensorMap* map_q, const TensorMap* map_k, const TensorMap* map_v, const TensorMap* map_g,
                                       const Params& p, const Sums& u, int nblocks, int nheads, int t) {
    tma_prefetch_map(map_q);
    tma_prefetch_map(map_k);
    tma_prefetch_map(map_v);
    tma_prefetch_map(map_g);
    const int tiles = nblocks * nheads, group = p.H / p.Hkv;
    RingState<STAGES> qs(1);
    RingState<2> kv(1), slot(1);
    for (sh.queue.give(slot, t); t < tiles; sh.queue.give(slot, t)) {
        const Item it = item_at(p, u, t, nblocks, nheads);
        mbarrier_wait(&sh.kv_empty[kv.slot], kv.parity);
        mbarrier_arrive_expect(&sh.kv_full[kv.slot], 2 * W * TILE);
#pragma unroll
        for (int w = 0; w < W; ++w) {
            load_rows<64, D>(sh.k[kv.slot][w], map_k, &sh.kv_full[kv.slot], it.n * KEYS + 64 * w, it.hk, it.b);
            load_rows<64, D>(sh.v[kv.slot][w], map_v, &sh.kv_full[kv.slot], it.n * KEYS + 64 * w, it.hk, it.b);
        }
        kv.advance();
#pragma unroll 1
        for (int i = it.m.end - 1; i >= it.m.begin; --i)
#pragma unroll 1
            for (int h = it.hk * group; h < (it.hk + 1) * group; ++h) {
                const uint32_t at = static_cast<uint32_t>(it.b * p.H + h) * p.Spad + i * BQ;
                mbarrier_wait(&sh.empty[qs.slot], qs.parity);
                mbarrier_arrive_expect(&sh.q_full[qs.slot], TILE + BQ * 4);
                load_rows<BQ, D>(sh.q[qs.slot], map_q, &sh.q_full[qs.slot], i * BQ, h, it.b);
                bulk_load(sh.lse2[qs.slot], p.lse2 + at, BQ * 4, &sh.q_full[qs.slot]);
                mbarrier_arrive_expect(&sh.g_full[qs.slot], TILE + BQ * 4);
                load_rows<BQ, D>(sh.g[qs.slot], map_g, &sh.g_full[qs.slot], i * BQ, h, it.b);
                bulk_load(sh.delta[qs.slot], p.delta + at, BQ * 4, &sh.g_full[qs.slot]);
                qs.advance();
            }
        t = atomicAdd(p.queue, 1);
    }
    Queue::leave(p.queue);
}

// One thread: waits for this CTA's turns, in its own order.
__device__ __forceinline__ void wait_for_turns(Shared& sh, const Params& p, const Sums& u, int nblocks, int nheads) {
    const int tiles = nblocks * nheads, group = p.H / p.Hkv;
    RingState<2> slot(0);
    RingState<TURNS> ts(1);
    for (int t = sh.queue.take_alone(slot); t < tiles; t = sh.queue.take_alone(slot)) {
        const Item it = item_at(p, u, t, nblocks, nheads);
#pragma unroll 1
        for (int i = it.m.end - 1; i >= it.m.begin; --i) {
            const Order o = order_of(p, it.b, i);
            if (o.first == o.last) continue;
            const int before = turn_of(it, o);
#pragma unroll 1
            for (int g = 0; g < group; ++g) {
                mbarrier_wait(&sh.turn_empty[ts.slot], ts.parity);
                while (load_acquire(u.turn + sum_at(u, it, group, g, i)) < before) {
                }
                mbarrier_arrive(&sh.turn_full[ts.slot]);
                ts.advance();
            }
        }
    }
}

// One thread: gives a turn on once this CTA's additions are made.
__device__ __forceinline__ void give_turns(Shared& sh, const Params& p, const Sums& u, int nblocks, int nheads) {
    const int tiles = nblocks * nheads, group = p.H / p.Hkv;
    RingState<2> slot(0);
    RingState<DONE> done(0);
    for (int t = sh.queue.take_alone(slot); t < tiles; t = sh.queue.take_alone(slot)) {
        const Item it = item_at(p, u, t, nblocks, nheads);
#pragma unroll 1
        for (int i = it.m.end - 1; i >= it.m.begin; --i) {
            const Order o = order_of(p, it.b, i);
            if (o.first == o.last) continue;
#pragma unroll 1
            for (int g = 0; g < group; ++g) {
                mbarrier_wait(&sh.done_full[done.slot], done.parity);
                add_release(u.turn + sum_at(u, it, group, g, i), 1);
                mbarrier_arrive(&sh.done_empty[done.slot]);
                done.advance();
            }
        }
    }
}

// A warpgroup: dQ of this CTA's items, and its sum.
__device__ __forceinline__ void dq_role(Shared& sh, const TensorMap* map_dq, const Params& p, const Sums& u, int nblocks, int nheads) {
    const int tiles = nblocks * nheads, group = p.H / p.Hkv, lane = threadIdx.x % 32, tid = threadIdx.x % 128;
    RingState<2> slot(0), kv(0);
    RingState<DONE> done(1);
    RingState<DS> ds(0);
    RingState<TURNS> ts(0);
    for (int t = sh.queue.take(slot); t < tiles; t = sh.queue.take(slot)) {
        const Item it = item_at(p, u, t, nblocks, nheads);
        mbarrier_wait(&sh.kv_full[kv.slot], kv.parity);
        const uint64_t keys = descriptor_mn_major(smem_address(sh.k[kv.slot][0]), TILE);
#pragma unroll 1
        for (int i = it.m.end - 1; i >= it.m.begin; --i) {
            const Order o = order_of(p, it.b, i);
            const bool sole = o.first == o.last, last = it.n == o.last, first = it.n == o.first;
#pragma unroll 1
            for (int g = 0; g < group; ++g) {
                float* sum = u.partial + static_cast<long>(sum_at(u, it, group, g, i)) * (BQ * D) + tid * 4;
                float dq[D / 2] = {};
                if (last && !sole) {  // the product goes on top of the sum; the latency of its loads passes under the wait for dS
                    mbarrier_wait(&sh.turn_full[ts.slot], ts.parity);
#pragma unroll
                    for (int j = 0; j < D / 8; ++j) load4(dq + 4 * j, sum + j * 512);
                }
                mbarrier_wait(&sh.ds_full[ds.slot], ds.parity);
                const uint64_t grads = descriptor_mn_major(smem_address(sh.ds[ds.slot][0]), TILE);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < KEYS / 16; ++k)
                    wgmma_ss<D, 1, 1>(dq, descriptor_advance(grads, k * 2048), descriptor_advance(keys, k * 2048), 1);
                wgmma_commit();
                wgmma_wait<0>();
                pin_registers(dq);
                if (lane == 0) mbarrier_arrive(&sh.ds_empty[ds.slot]);
                ds.advance();
                if (last) {
                    if (tid == 0) tma_store_wait_read<0>();
                    named_barrier_sync(10, 128);
                    stage<D>(sh.dq, dq, p.scale, p.scale);
                    fence_async_shared();
                    named_barrier_sync(10, 128);
                    if (tid == 0) {
                        store_rows<D>(map_dq, sh.dq, i * BQ, it.hk * group + g, it.b);
                        tma_store_commit();
                    }
                } else {
                    mbarrier_wait(&sh.turn_full[ts.slot], ts.parity);
                    if (first) {
#pragma unroll
                        for (int j = 0; j < D / 8; ++j) store4(sum + j * 512, dq + 4 * j);
                    } else {
#pragma unroll
                        for (int j = 0; j < D / 8; ++j) add4(sum + j * 512, dq + 4 * j);
                    }
                }
                if (!sole) {
                    mbarrier_wait(&sh.done_empty[done.slot], done.parity);
                    __syncwarp();  // the lanes' accesses come before the arrival
                    if (lane == 0) {
                        mbarrier_arrive(&sh.turn_empty[ts.slot]);
                        mbarrier_arrive(&sh.done_full[done.slot]);
                    }
                    ts.advance();
                    done.advance();
                }
            }
        }
        if (lane == 0) mbarrier_arrive(&sh.kv_empty[kv.slot]);
        kv.advance();
    }
    if (tid == 0) tma_store_wait_read<0>();
}

// A warpgroup: S, P, dP, dS, dK and dV of 64 keys.
__device__ __forceinline__ void consumer(Shared& sh, const TensorMap* map_dk, const TensorMap* map_dv, const Params& p, const Sums& u, int nblocks,
                                         int nheads, int w) {
    const int tiles = nblocks * nheads, group = p.H / p.Hkv, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const float c = p.scale * LOG2_E;
    RingState<STAGES> qs(0);
    RingState<2> kv(0), slot(0);
    RingState<DS> dss(1);
    bool stored = false;
    const uint32_t at = swizzle_128(warp * 16 + lane % 16, lane / 16 * 16);  // this lane's address in a tile for ldmatrix and stmatrix
    for (int t = sh.queue.take(slot); t < tiles; t = sh.queue.take(slot)) {
        const Item it = item_at(p, u, t, nblocks, nheads);
        const int n0 = it.n * KEYS + 64 * w, row = n0 + 16 * warp + lane / 4;
        const Span none{1, 0};  // keys beyond the last: K is zero there, but P would be exp2(-lse2), at worst inf, and dQ sums over them
        const Span span0 = row < p.Sk ? queries_of(p, it.b, row) : none;
        const Span span1 = row + 8 < p.Sk ? queries_of(p, it.b, row + 8) : none;
        Blocks own = blocks<BQ>(queries_of(p, it.b, n0), queries_of(p, it.b, n0 + 63));
        if (n0 >= p.Sk) own.end = own.begin;
        if (n0 + 63 >= p.Sk) own.clear_hi = 0;  // mask every block
        uint8_t *k = sh.k[kv.slot][w], *v = sh.v[kv.slot][w];

        float dk[D / 2] = {}, dv[D / 2] = {}, s[BQ / 2] = {}, dp[BQ / 2] = {};
        Fragment<BQ> pr = {}, ds = {};
        uint32_t held = 0;
        mbarrier_wait(&sh.kv_full[kv.slot], kv.parity);
        if (stored && threadIdx.x % 128 == 0) {  // the other place, once the outputs staged there have been read
            tma_store_wait_read<0>();
            mbarrier_arrive(&sh.kv_empty[kv.slot ^ 1]);
        }
        Fragment<D> fv;
#pragma unroll
        for (int j = 0; j < D / 16; ++j) ldmatrix_x4(smem_address(v) + (at ^ j * 32), fv[j][0], fv[j][1], fv[j][2], fv[j][3]);
        bool busy = false;
        for (int i = it.m.end - 1; i >= it.m.begin; --i)
            for (int g = 0; g < group; ++g) {
                const uint32_t grads = smem_address(sh.ds[dss.slot][w]);
                if (i < own.begin || i >= own.end) {  // a block that only the other consumer needs: its dS here is zero
                    if (busy) {  // let go before skipping, as in dkv of backward.cu
                        wgmma_wait<0>();
                        mbarrier_arrive(&sh.empty[held]);
                        busy = false;
                    }
                    mbarrier_wait(&sh.q_full[qs.slot], qs.parity);
                    mbarrier_wait(&sh.g_full[qs.slot], qs.parity);
                    mbarrier_arrive(&sh.empty[qs.slot]);
                    qs.advance();
                    mbarrier_wait(&sh.ds_empty[dss.slot], dss.parity);
#pragma unroll
                    for (int j = 0; j < BQ / 16; ++j) stmatrix_x4(grads + (at ^ j * 32), 0, 0, 0, 0);
                    fence_async_shared();
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(&sh.ds_full[dss.slot]);
                    dss.advance();
                    continue;
                }
                mbarrier_wait(&sh.q_full[qs.slot], qs.parity);
                wgmma_fence();
                mma_abt<BQ, D>(s, k, sh.q[qs.slot]);
                wgmma_commit();
                wgmma_wait<1>();  // the dV and dK products of the block before
                pin_registers(pr);
                pin_registers(ds);
                if (busy) mbarrier_arrive(&sh.empty[held]);
                mbarrier_wait(&sh.g_full[qs.slot], qs.parity);
                wgmma_fence();
                mma_rbt(dp, fv, sh.g[qs.slot]);
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
                mbarrier_wait(&sh.ds_empty[dss.slot], dss.parity);
                keep_order(i);
                wgmma_wait<1>();
                pin_registers(s);
                if (i >= own.clear_hi || i < own.clear_lo) mask<BQ>(s, i * BQ, span0, span1);
                float2 d[BQ / 8];  // takes the registers of `shift` as they fall free, so that its latency too is over in time
#pragma unroll
                for (int j = 0; j < BQ / 8; ++j) {
                    s[4 * j] = exp2_approx(fmaf(s[4 * j], c, shift[2 * j]));
                    s[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], c, shift[2 * j + 1]));
                    s[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], c, shift[2 * j]));
                    s[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], c, shift[2 * j + 1]));
                    d[j] = delta[4 * j];
                }
                to_bf16<BQ>(pr, s);
                wgmma_fence();
                mma_pb<D, BQ>(dv, pr, sh.g[qs.slot], 1);
                wgmma_commit();
                wgmma_wait<1>();
                pin_registers(dp);
#pragma unroll
                for (int j = 0; j < BQ / 8; ++j) {
                    s[4 * j] *= dp[4 * j] - d[j].x;
                    s[4 * j + 1] *= dp[4 * j + 1] - d[j].y;
                    s[4 * j + 2] *= dp[4 * j + 2] - d[j].x;
                    s[4 * j + 3] *= dp[4 * j + 3] - d[j].y;
                }
                to_bf16<BQ>(ds, s);
                wgmma_fence();
                mma_pb<D, BQ>(dk, ds, sh.q[qs.slot], 1);
                wgmma_commit();
#pragma unroll  // under the dK product, which reads the same registers
                for (int j = 0; j < BQ / 16; ++j) stmatrix_x4(grads + (at ^ j * 32), ds[j][0], ds[j][1], ds[j][2], ds[j][3]);
                fence_async_shared();
                __syncwarp();
                if (lane == 0) mbarrier_arrive(&sh.ds_full[dss.slot]);
                dss.advance();
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
        stage<D>(sh.dk[w], dk, p.scale, p.scale);  // not over K: dQ may still read it
        fence_async_shared();
        named_barrier_sync(8 + w, 128);
        if (threadIdx.x % 128 == 0) {
            store_rows<D>(map_dv, v, n0, it.hk, it.b);
            store_rows<D>(map_dk, sh.dk[w], n0, it.hk, it.b);
            tma_store_commit();
        }
        stored = true;
        kv.advance();
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
}

__device__ __forceinline__ void pass(const TensorMap* map_q, const TensorMap* map_k, const TensorMap* map_v, const TensorMap* map_g,
                                     const TensorMap* map_dq, const TensorMap* map_dk, const TensorMap* map_dv, const Params& p, const Sums& u) {
    extern __shared__ uint8_t raw[];
    Shared& sh = *reinterpret_cast<Shared*>(raw + ((1024 - (smem_address(raw) & 1023)) & 1023));
    const int warp = warp_index(), wg = warp / 4;
    int item = 0;
    if (threadIdx.x == 0) {
        item = atomicAdd(p.queue, 1);  // under the set-up of the barriers
        for (int s = 0; s < 2; ++s) {
            mbarrier_init(&sh.kv_full[s], 1);
            mbarrier_init(&sh.kv_empty[s], W + 4);
        }
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(&sh.q_full[s], 1);
            mbarrier_init(&sh.g_full[s], 1);
            mbarrier_init(&sh.empty[s], 128 * W);
        }
        for (int s = 0; s < DS; ++s) {
            mbarrier_init(&sh.ds_full[s], 4 * W);
            mbarrier_init(&sh.ds_empty[s], 4);
        }
        for (int s = 0; s < TURNS; ++s) {
            mbarrier_init(&sh.turn_full[s], 1);
            mbarrier_init(&sh.turn_empty[s], 4);
        }
        for (int s = 0; s < DONE; ++s) {
            mbarrier_init(&sh.done_full[s], 4);
            mbarrier_init(&sh.done_empty[s], 1);
        }
        sh.queue.init(4 * W + 4 + 2);
        mbarrier_init_fence();
    }
    __syncthreads();
    const int nblocks = (p.Sk + KEYS - 1) / KEYS, nheads = p.B * p.Hkv;
    if (wg == 0) {
        registers_decrease<40>();
        if (threadIdx.x % 32 == 0) {
            if (warp == 0) copies(sh, map_q, map_k, map_v, map_g, p, u, nblocks, nheads, item);
            if (warp == 1) wait_for_turns(sh, p, u, nblocks, nheads);
            if (warp == 2) give_turns(sh, p, u, nblocks, nheads);
        }
    } else if (wg == 3) {
        registers_decrease<88>();
        dq_role(sh, map_dq, p, u, nblocks, nheads);
    } else {
        registers_increase<192>();
        consumer(sh, map_dk, map_dv, p, u, nblocks, nheads, wg - 1);
    }
}

}  // namespace one_pass

}  // namespace attn

#define MAP(name) const __grid_constant__ ptx::TensorMap name
extern "C" __global__ __launch_bounds__(attn::one_pass::THREADS) void attn_bwd_delta_d64(
    const uint16_t* o, const attn::Strides so, const uint16_t* g, const attn::Strides sg, uint16_t* dq, const attn::Strides sdq,
    const __grid_constant__ attn::Params p, const __grid_constant__ attn::one_pass::Sums u) {
    attn::one_pass::delta(o, so, g, sg, dq, sdq, p, u);
}
extern "C" __global__ __launch_bounds__(512, 1) void attn_bwd_one_d64(
    MAP(q), MAP(k), MAP(v), MAP(g), MAP(dq), MAP(dk), MAP(dv), const __grid_constant__ attn::Params p,
    const __grid_constant__ attn::one_pass::Sums u) {
    attn::one_pass::pass(&q, &k, &v, &g, &dq, &dk, &dv, p, u);
}
