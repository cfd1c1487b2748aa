// The epilogues of the GEMM: from the accumulators of a consumer warpgroup to C, to what its activation saw, or to the workspace of split
// tiles.
//
// C leaves in items: chunks of 64 rows x 128 bytes, and of each chunk what enters the activation (SAVE_PRE) before what leaves it. The
// warpgroup writes an item into one of its staging buffers, swizzled, and one of its threads sends it by TMA.
//
// ROWS blend: row i of C is rows[i] times the product's, and factors[i] table[picks[i]] besides. ROWS powers: element x of row i becomes e^(x - rows[i]), and the powers of each row
// are summed tile by tile. The difference waits in fp16, whose 11 bits keep it to 2^-12 of itself; what is no number counts as inf there, and
// where rows[i] is inf all powers are 0.
#pragma once
#include "../common/activation.cuh"
#include "../common/bf16.cuh"
#include "../common/f16.cuh"
#include "../common/fence.cuh"
#include "../common/math.cuh"
#include "../common/matrix.cuh"
#include "../common/mbarrier.cuh"
#include "../common/tma.cuh"
#include "config.cuh"
#include "raster.cuh"

namespace matmul {

template <class C>
struct Epilogue {
    static constexpr int BN = C::BN, STAGING = C::STAGING, CHUNK_N = C::CHUNK_N, CHUNKS = C::CHUNKS, KINDS = C::KINDS, ITEMS = C::ITEMS;
    static constexpr int PER = C::PER;
    static constexpr bool PAIR = C::PAIR, BIAS = C::BIAS, SAVE_PRE = C::SAVE_PRE, AUX_IN = C::AUX_IN;
    using Accumulators = float[C::MI][BN / 2];
    static constexpr int BIASES = C::DEFER ? BN / 64 : BN / 8;  // pairs of columns whose bias a thread holds
    using Bias = uint32_t[BIAS ? BIASES : 1];
    using Rounded = uint32_t[C::DEFER ? C::MI : 1][C::DEFER ? BN / 4 : 1];  // a thread's part of a tile in bf16 (powers: fp16), in pairs
    static constexpr bool POWERS = C::ROWS == Rows::powers;
    static constexpr int LEAVING = POWERS ? 3 * ITEMS : ITEMS;  // steps under which a rounded tile leaves
    using OfRows = float[C::ROWS == Rows::none ? 1 : 2 * C::MI];  // of a thread's rows lane / 4 and lane / 4 + 8 of each 64

    const Problem& p;
    const TensorMap& map_c;
    const TensorMap& map_aux;
    Barriers<C>& barriers;
    uint8_t* const buffers;  // the staging buffers of this warpgroup, which go round
    const int warpgroup, lane;
    const int warp_row;        // first row of this thread's warp in a chunk
    const bool issuer;         // whether this thread issues the warpgroup's copies
    uint32_t chunks_done;      // chunks that have been given a staging buffer
    int row0, column0, batch;  // where the warpgroup's part of the tile begins in C
    OfRows sums;               // POWERS: of the powers of the tile that leaves
    uint32_t most[POWERS ? 2 : 1];  // POWERS: what its differences are at most

    // Turns to the tile of `work`.
    __device__ __forceinline__ void begin(const Work& work) {
        row0 = work.m + (C::PINGPONG ? 0 : warpgroup * C::WARPGROUP_M);
        column0 = work.n * C::OUT_BN;
        batch = work.batch;
    }

    // The bias of this thread's columns in tile column `n`, asked for now and used after the steps; 0 beyond N. DEFER leaves few registers:
    // of the eight lanes that have the same columns each holds an eighth.
    __device__ __forceinline__ void load_bias(Bias& bias, int n) const {
        if constexpr (BIAS) {
            const int first = C::DEFER ? lane / 4 * BIASES : 0;
#pragma unroll
            for (int j = 0; j < BIASES; ++j) {
                const int column = n * C::OUT_BN + (first + j) * 8 + (lane % 4) * 2;
                bias[j] = 0;
                if (column + 1 < p.n) bias[j] = __ldg(reinterpret_cast<const unsigned int*>(p.bias + column));
                if (column + 1 == p.n) bias[j] = __ldg(reinterpret_cast<const unsigned short*>(p.bias + column));
            }
        }
    }

    // Asks for what ROWS has for this warpgroup's rows in the tile of `work`: into L1. Loads under way to registers would be waited for before
    // the steps begin.
    __device__ __forceinline__ void fetch_rows(const Work& work) const {
        if constexpr (C::ROWS != Rows::none) {
            const int row = work.m + (C::PINGPONG ? 0 : warpgroup * C::WARPGROUP_M) + static_cast<int>(threadIdx.x % 128);
            if (row < p.m && threadIdx.x % 128 < C::WARPGROUP_M) asm volatile("prefetch.global.L1 [%0];" ::"l"(p.rows + row));
        }
    }

    // What ROWS has for this thread's rows in the tile; 0 beyond M.
    __device__ __forceinline__ void load_rows(OfRows& rows) const {
        if constexpr (C::ROWS != Rows::none) {
#pragma unroll
            for (int i = 0; i < 2 * C::MI; ++i) {
                const int row = row0 + warp_row + lane / 4 + i / 2 * 64 + i % 2 * 8;
                rows[i] = row < p.m ? __ldg(p.rows + row) : 0.0f;
            }
        }
    }

    // ROWS blend. The tile as it will be written, in its place: begin() has turned to it.
    __device__ __forceinline__ void blend(Accumulators& acc, const OfRows& rows) const {
        if constexpr (C::ROWS == Rows::blend) {
#pragma unroll
            for (int i = 0; i < 2 * C::MI; ++i) {
                const int row = row0 + warp_row + lane / 4 + i / 2 * 64 + i % 2 * 8;
                const float factor = row < p.m ? __ldg(p.factors + row) : 0.0f;
                const __nv_bfloat16* const from = p.table + (factor != 0.0f ? static_cast<size_t>(__ldg(p.picks + row)) * p.n : 0);
#pragma unroll
                for (int j = 0; j < BN / 8; ++j) {
                    const int column = column0 + j * 8 + lane % 4 * 2;
                    uint32_t two = 0;
                    if (factor != 0.0f && column < p.n) two = __ldg(reinterpret_cast<const unsigned int*>(from + column));  // N is even
                    float* const d = &acc[i / 2][4 * j + i % 2 * 2];
                    d[0] = d[0] * rows[i] + factor * bf16_low(two);
                    d[1] = d[1] * rows[i] + factor * bf16_high(two);
                }
            }
        }
    }

    // Asks for the aux input of item `item`; it lands in the staging buffer of chunk number `number`.
    __device__ __forceinline__ void load_aux(uint32_t number, int item) const {
        mbarrier_t* const barrier = &barriers.aux[warpgroup][number % STAGING];
        mbarrier_arrive_expect(barrier, C::CHUNK_BYTES);
        tma_load_3d(buffers + number % STAGING * C::CHUNK_BYTES, &map_aux, barrier, column0 + item % CHUNKS * CHUNK_N,
                    row0 + item / CHUNKS * 64, batch);
    }

    // The first aux inputs of the tile, once what lay in their buffers has been read.
    __device__ __forceinline__ void load_first_aux() const {
        if (AUX_IN && issuer) {
            tma_store_wait_read<0>();
#pragma unroll
            for (int i = 0; i < (STAGING < ITEMS ? STAGING : ITEMS); ++i) load_aux(chunks_done + i, i);
        }
    }

    // The staging buffer of the chunk that is `i` further on.
    __device__ __forceinline__ uint8_t* buffer_of(int i) const { return buffers + ((chunks_done + i) % STAGING) * C::CHUNK_BYTES; }

    // A chunk of fp32, to shared address `address`.
    __device__ __forceinline__ void write_f32(const Accumulators& acc, const Bias& bias, int mi, int chunk, uint32_t address) const {
        const uint32_t row = warp_row + lane / 4;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float* const d = &acc[mi][(chunk * 4 + j) * 4];
            const float b0 = BIAS ? bf16_low(bias[chunk * 4 + j]) : 0.0f;
            const float b1 = BIAS ? bf16_high(bias[chunk * 4 + j]) : 0.0f;
            const uint32_t at = j * 32 + (lane % 4) * 8;
            store_shared_f32x2(address + swizzle_128(row, at), BIAS ? d[0] + b0 : d[0], BIAS ? d[1] + b1 : d[1]);
            store_shared_f32x2(address + swizzle_128(row + 8, at), BIAS ? d[2] + b0 : d[2], BIAS ? d[3] + b1 : d[3]);
        }
    }

    // A chunk of bf16. All of its arithmetic lies between its loads and its stores: independent elements hide each other's latency.
    __device__ __forceinline__ void write_bf16(const Accumulators& acc, const Bias& bias, int mi, int chunk, int kind, int i,
                                               uint32_t address) const {
        const uint32_t row = warp_row + (lane & 15);
        if (AUX_IN) mbarrier_wait(&barriers.aux[warpgroup][(chunks_done + i) % STAGING], ((chunks_done + i) / STAGING) & 1);
        uint32_t at[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) at[q] = address + swizzle_128(row, q * 32 + (lane >> 4) * 16);
        uint32_t other[16];
        if constexpr (AUX_IN) {
#pragma unroll
            for (int q = 0; q < 4; ++q) ldmatrix_x4(at[q], other[4 * q], other[4 * q + 1], other[4 * q + 2], other[4 * q + 3]);
            __syncwarp();  // every lane has read before any lane writes
        }
        uint32_t v[16];
#pragma unroll
        for (int pair = 0; pair < 16; ++pair) {
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int element = chunk * 32 + pair * 2 + e;
                x[e] = acc[mi][(PAIR && SAVE_PRE && kind == 1 ? BN / 4 : 0) + element];
                if constexpr (BIAS) {
                    const uint32_t two = bias[element / 4];
                    x[e] += e ? bf16_high(two) : bf16_low(two);
                }
                if (C::ACT == Activation::gelu && kind == KINDS - 1) x[e] = activation::gelu_tanh<true>(x[e]);
                if (C::ACT == Activation::swiglu && kind == KINDS - 1) x[e] = activation::silu(x[e]) * acc[mi][BN / 4 + element];
                if constexpr (AUX_IN) x[e] *= activation::gelu_tanh_gradient<true>(e ? bf16_high(other[pair]) : bf16_low(other[pair]));
            }
            v[pair] = pack_bf16(x[0], x[1]);
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) stmatrix_x4(at[q], v[4 * q], v[4 * q + 1], v[4 * q + 2], v[4 * q + 3]);
    }

    // DEFER. The tile, its bias added, as it will leave (POWERS: as it becomes powers). All lanes of a warp together: they hold each other's
    // bias.
    __device__ __forceinline__ void round(Rounded& rounded, const Accumulators& acc, const Bias& bias, const OfRows& rows) {
        if constexpr (POWERS) {
            differences(rounded, acc, rows);
        } else {
#pragma unroll
            for (int mi = 0; mi < C::MI; ++mi) {
#pragma unroll
                for (int j = 0; j < BN / 8; ++j) {
                    const float* const d = &acc[mi][4 * j];
                    uint32_t two = 0;
                    if constexpr (BIAS) two = __shfl_sync(~0u, bias[j % BIASES], j / BIASES * 4 + lane % 4);
                    const float b0 = bf16_low(two), b1 = bf16_high(two);
                    rounded[mi][2 * j] = pack_bf16(BIAS ? d[0] + b0 : d[0], BIAS ? d[1] + b1 : d[1]);
                    rounded[mi][2 * j + 1] = pack_bf16(BIAS ? d[2] + b0 : d[2], BIAS ? d[3] + b1 : d[3]);
                }
            }
        }
    }

    // POWERS. By how many powers of two the elements of the tile lie above their rows', -inf beyond N. One fused multiply-add for each: its
    // error, 2^-24 of the row's, is that of the element itself.
    __device__ __forceinline__ void differences(Rounded& rounded, const Accumulators& acc, const OfRows& rows) {
        const float base[2] = {rows[0] * LOG2_E, rows[1] * LOG2_E};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            most[r] = rows[r] == __int_as_float(0x7f800000) ? F16_MINUS_INFINITY : F16_INFINITY;
            sums[r] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < BN / 4; ++i) {
            const float* const d = &acc[0][2 * i];
            rounded[0][i] = pack_f16(d[0] * LOG2_E - base[i % 2], d[1] * LOG2_E - base[i % 2]);
        }
        if (column0 + BN > p.n) {
#pragma unroll
            for (int i = 0; i < BN / 4; ++i) {
                const int column = column0 + i / 2 * 8 + lane % 4 * 2;
                if (column >= p.n) rounded[0][i] = F16_MINUS_INFINITY;
                if (column + 1 == p.n) rounded[0][i] = (rounded[0][i] & 0xffffu) | (F16_MINUS_INFINITY & 0xffff0000u);
            }
        }
    }

    // POWERS. Makes powers of half a chunk of a tile's differences, in their place.
    template <int HALF>
    __device__ __forceinline__ void raise(Rounded& rounded) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t& two = rounded[0][HALF * 8 + i];
            two = min_f16(two, most[i % 2]);
            const float low = exp2_approx(f16_low(two)), high = exp2_approx(f16_high(two));
            sums[i % 2] += low + high;
            two = pack_bf16(low, high);
        }
    }

    // POWERS. The sums of the tile leave.
    __device__ __forceinline__ void write_sums() const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = sums[r];
            sum += __shfl_xor_sync(~0u, sum, 1);  // of the four lanes that share a row
            sum += __shfl_xor_sync(~0u, sum, 2);
            const int row = row0 + warp_row + lane / 4 + r * 8;
            if (lane % 4 == 0 && row < p.m) p.sums[static_cast<size_t>(column0 / BN) * p.m + row] = sum;
        }
    }

    // DEFER. Step `step` of LEAVING of a rounded tile's way. POWERS: each chunk is raised half by half, then written.
    __device__ __forceinline__ void leave(Rounded& rounded, int step) {
        if constexpr (POWERS) {
            static_assert(ITEMS == 4, "a case for each step");
            switch (step) {
                case 0: raise<0>(rounded); break;
                case 1: raise<1>(rounded); break;
                case 2: write_one<0>(rounded); break;
                case 3: raise<2>(rounded); break;
                case 4: raise<3>(rounded); break;
                case 5: write_one<1>(rounded); break;
                case 6: raise<4>(rounded); break;
                case 7: raise<5>(rounded); break;
                case 8: write_one<2>(rounded); break;
                case 9: raise<6>(rounded); break;
                case 10: raise<7>(rounded); write_sums(); break;
                default: write_one<3>(rounded); break;
            }
        } else {
            write_rounded(rounded, step, step + 1);
        }
    }

    // DEFER. What of its way is left from step `first` on.
    __device__ __forceinline__ void leave_rest(Rounded& rounded, int first) {
        if constexpr (POWERS) {
#pragma unroll 1
            for (int step = first; step < LEAVING; ++step) leave(rounded, step);
        } else {
            write_rounded(rounded, first, ITEMS);
        }
    }

    // DEFER. Writes chunk ITEM of a rounded tile and sends it off.
    template <int ITEM>
    __device__ __forceinline__ void write_one(const Rounded& rounded) {
        if (issuer) tma_store_wait_read<STAGING - 1>();
        named_barrier_sync(STAGING_BARRIER + warpgroup, 128);
        const uint32_t address = smem_address(buffer_of(0));
        const uint32_t* const v = &rounded[ITEM / CHUNKS][ITEM % CHUNKS * 16];
#pragma unroll
        for (int q = 0; q < 4; ++q)
            stmatrix_x4(address + swizzle_128(warp_row + (lane & 15), q * 32 + (lane >> 4) * 16), v[4 * q], v[4 * q + 1], v[4 * q + 2],
                        v[4 * q + 3]);
        fence_async_shared();  // by the writers, towards the copy engine
        named_barrier_sync(STAGING_BARRIER + warpgroup, 128);
        if (issuer) {
            send_item(ITEM, 0);
            tma_store_commit();
        }
        ++chunks_done;
    }

    // DEFER. Writes chunks `first` .. `last` - 1 of a rounded tile.
    template <int ITEM = 0>
    __device__ __forceinline__ void write_rounded(const Rounded& rounded, int first, int last) {
        if constexpr (ITEM < ITEMS) {
            if (ITEM >= first && ITEM < last) write_one<ITEM>(rounded);
            write_rounded<ITEM + 1>(rounded, first, last);
        }
    }

    // Writes item `item` of the tile into its staging buffer, which is `i` further on. All threads.
    __device__ __forceinline__ void write_item(const Accumulators& acc, const Bias& bias, int item, int i) const {
        const int kind = item % KINDS;
        const int chunk = item / KINDS % CHUNKS;
        const int mi = item / KINDS / CHUNKS;
        const uint32_t address = smem_address(buffer_of(i));
        if constexpr (C::OUT == Output::bf16) {
            write_bf16(acc, bias, mi, chunk, kind, i, address);
        } else {
            write_f32(acc, bias, mi, chunk, address);
        }
    }

    // Sends it off. One thread.
    __device__ __forceinline__ void send_item(int item, int i) const {
        const int kind = item % KINDS;
        const int column = column0 + item / KINDS % CHUNKS * CHUNK_N;
        const int row = row0 + item / KINDS / CHUNKS * 64;
        if (kind < KINDS - 1) {
            tma_store_3d(&map_aux, buffer_of(i), column, row, PAIR ? kind : batch);
        } else if (C::OUT == Output::f32_add) {
            tma_add_3d(&map_c, buffer_of(i), column, row, batch);
        } else {
            tma_store_3d(&map_c, buffer_of(i), column, row, batch);
        }
    }

    // The whole tile: PER items share one pass through the barriers and one bulk group.
    __device__ __forceinline__ void write(const Accumulators& acc, const Bias& bias) {
#pragma unroll
        for (int item = 0; item < ITEMS; item += PER) {
            if constexpr (!AUX_IN) {
                if (issuer) tma_store_wait_read<STAGING / PER - 1>();
                named_barrier_sync(STAGING_BARRIER + warpgroup, 128);
            }
#pragma unroll
            for (int i = 0; i < PER; ++i)
                if (item + i < ITEMS) write_item(acc, bias, item + i, i);
            fence_async_shared();
            named_barrier_sync(STAGING_BARRIER + warpgroup, 128);
            if (issuer) {
#pragma unroll
                for (int i = 0; i < PER; ++i)
                    if (item + i < ITEMS) send_item(item + i, i);
                tma_store_commit();
                if (AUX_IN && item + STAGING < ITEMS) {
                    tma_store_wait_read<0>();
#pragma unroll
                    for (int i = 0; i < PER; ++i)
                        if (item + i + STAGING < ITEMS) load_aux(chunks_done + i, item + i + STAGING);
                }
            }
            chunks_done += item + PER <= ITEMS ? PER : ITEMS - item;
        }
    }

    // The partial sums of a split tile, straight to slot `slot` of the workspace.
    __device__ __forceinline__ void write_partial(const Accumulators& acc, int slot, uint32_t rank) const {
        const size_t index = static_cast<size_t>(slot) * C::CLUSTER + rank;
        float* const tile = p.workspace + index * (C::BM * BN) +
                            ((C::PINGPONG ? 0 : warpgroup * C::WARPGROUP_M) + warp_row + lane / 4) * BN + (lane % 4) * 2;
#pragma unroll
        for (int mi = 0; mi < C::MI; ++mi) {
#pragma unroll
            for (int j = 0; j < BN / 8; ++j) {
                float* const at = tile + mi * (64 * BN) + j * 8;
                *reinterpret_cast<float2*>(at) = make_float2(acc[mi][4 * j], acc[mi][4 * j + 1]);
                *reinterpret_cast<float2*>(at + 8 * BN) = make_float2(acc[mi][4 * j + 2], acc[mi][4 * j + 3]);
            }
        }
    }
};

}  // namespace matmul
