// What of the GEMM is chosen when it is compiled (gemm.cu says what each choice means), and the sizes that follow from it.
#pragma once
#include <cstdint>

#include "../common/mbarrier.cuh"
#include "output.cuh"

namespace matmul {

using namespace ptx;

enum class Activation { none, gelu, swiglu };
enum class Rows { none, blend, powers };

struct Config {
    static constexpr int BM = GEMM_BM;
    static constexpr int BN = GEMM_BN;
    static constexpr int STAGES = GEMM_STAGES;
    static constexpr int STAGING = GEMM_STAGING;
    static constexpr int CLUSTER = GEMM_CLUSTER;
    static constexpr bool PINGPONG = GEMM_PINGPONG;
    static constexpr bool A_MN = GEMM_A_MN;
    static constexpr bool B_MN = GEMM_B_MN;
    static constexpr Output OUT = static_cast<Output>(GEMM_OUT);
    static constexpr bool BIAS = GEMM_BIAS;
    static constexpr Activation ACT = static_cast<Activation>(GEMM_ACT);
    static constexpr bool SAVE_PRE = GEMM_SAVE_PRE;
    static constexpr bool AUX_IN = GEMM_AUX_IN;
    static constexpr Rows ROWS = static_cast<Rows>(GEMM_ROWS);
    static constexpr bool SPLIT = GEMM_SPLIT > 0;
    static constexpr bool OWNED = GEMM_SPLIT == 2;
    static constexpr bool DEFER = GEMM_DEFER;
    static constexpr int AHEAD = GEMM_AHEAD;

    // Operands.
    static constexpr bool PAIR = ACT == Activation::swiglu;  // B holds gate and up, half of its rows each: a tile has half as many columns
    static constexpr int BK = 64;
    static constexpr int A_BYTES = BM * BK * 2;
    static constexpr int B_BYTES = BN * BK * 2;
    static constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
    static constexpr int PANEL_BYTES = BK * 128;  // MN-major: 64 elements of M or N, BK rows of k
    static constexpr int B_BOX_ROWS = PAIR || CLUSTER == 2 ? BN / 2 : BN;
    static constexpr int READERS = 4 * (PINGPONG ? 1 : 2) * CLUSTER;  // warps that read a slot of the ring

    // Output.
    static constexpr int WARPGROUP_M = PINGPONG ? BM : BM / 2;  // rows of a consumer warpgroup
    static constexpr int MI = WARPGROUP_M / 64;                 // runs of 64 of them, each an accumulator of wgmma
    static constexpr int OUT_BN = PAIR ? BN / 2 : BN;           // output columns of a tile
    static constexpr int CHUNK_BYTES = 64 * 128;                // the output leaves in chunks of 64 rows
    static constexpr int CHUNK_N = OUT == Output::bf16 ? 64 : 32;
    static constexpr int CHUNKS = OUT_BN / CHUNK_N;                       // of 64 rows
    static constexpr int KINDS = SAVE_PRE ? (PAIR ? 3 : 2) : 1;           // what is written of each chunk
    static constexpr int ITEMS = MI * CHUNKS * KINDS;                     // that a warpgroup writes of a tile
    static constexpr int PER = STAGING % 2 == 0 && STAGING >= 4 ? 2 : 1;  // items written between two barriers

    // Parts of split tiles.
    static constexpr int PIECE = 32;                       // sums of a thread that are added together
    static constexpr int PIECES = MI * BN / 2 / PIECE;     // of a part
    static constexpr int PIECE_BYTES = 256 * PIECE * 4;    // of a CTA
    static constexpr int PART_WARPS = 8;                   // that write a part, and tell of it

    static_assert(MI >= 1 && WARPGROUP_M % 64 == 0, "a consumer warpgroup owns a multiple of 64 rows");
    static_assert(MI * BN <= 256, "accumulators of a warpgroup fit its registers");
    static_assert(BN % 64 == 0 && BN <= 256, "panels of 64 columns");
    static_assert(!PAIR || (OUT == Output::bf16 && !B_MN && !BIAS && !AUX_IN && BN % 128 == 0), "SwiGLU: bf16 output, K-major weights");
    static_assert(!SPLIT || OWNED || AHEAD == 0, "runs whose parts another kernel adds are dealt out");
    static_assert(!OWNED || (AHEAD > 0 && !PINGPONG), "an owner awaits runs that were drawn before its own; its parts are of a whole CTA");
    static_assert(!OWNED || (PIECES * PIECE == MI * BN / 2 && PIECE_BYTES <= STAGE_BYTES), "a piece of a part fits a slot of the ring");
    static_assert(!SPLIT || (!BIAS && ACT == Activation::none && !AUX_IN), "split tiles have a plain epilogue");
    static_assert(!DEFER || (!PINGPONG && !SPLIT && OUT == Output::bf16 && ACT == Activation::none && !AUX_IN && PER == 1),
                  "what waits to be written is the product and its bias, rounded to bf16");
    static_assert(ROWS == Rows::none || (OUT == Output::bf16 && !BIAS && ACT == Activation::none && !AUX_IN && (!SPLIT || OWNED)),
                  "factors of rows meet the product alone, whole, on its way to bf16");
    static_assert(ROWS != Rows::powers || (DEFER && MI == 1), "powers are made under the products of the next tile");
    static_assert(!AUX_IN || (OUT == Output::bf16 && !SAVE_PRE), "aux input uses the staging buffers");
    static_assert(STAGES * STAGE_BYTES + 2 * STAGING * CHUNK_BYTES + 512 + 1024 <= 232448, "shared memory budget");
};

// Of a CTA, behind the ring and the staging buffers in shared memory.
template <class C>
struct Barriers {
    mbarrier_t full[C::STAGES];
    mbarrier_t empty[C::STAGES];
    mbarrier_t aux[2][C::STAGING];
};

// Those of the ring: full[s] says that slot s has landed, empty[s] that it has been read.
struct RingBarriers {
    mbarrier_t* full;
    mbarrier_t* empty;
};

// Named barriers, one for each consumer warpgroup.
constexpr int STAGING_BARRIER = 1;  // 1 and 2: its staging buffers
constexpr int TURN_BARRIER = 3;     // 3 and 4: its turn (PINGPONG)

}  // namespace matmul
