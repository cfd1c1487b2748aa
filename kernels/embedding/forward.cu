// Embedding forward, bf16: y[n] = table[id[n]], or table[id[n]] + positions[place[n]] rounded once (token and position embedding in one
// pass). An id or place outside its table makes the row NaN, so that the loss shows it.
//
// Compile-time parameters: EMBEDDING_ADD 1: adds the position's row.  EMBEDDING_DEEP: vectors of a step.
//
// Work. A warp per `each` rows (at most 32), 4 warps per CTA. Rows are dealt not in their order but by `turns` rows that lie `apart` rows
//   from one another: those of one place in their sequences, which most often have one position, so that L1 holds it. (turns = rows: in
//   their order.) Lane r reads the id and the place of the warp's row r, so the warp waits for them once; then it walks over the rows in
//   steps of DEEP vectors of 16 bytes a lane, with the next step loaded before one is written. Bits depend on nothing but data.
// Stores leave L2 first (common/once.cuh): table and positions are read again.
// Bytes: the row read and written (4 C) + 4 per id; positions come from L2. No shared memory, no barrier.
#include "../common/fence.cuh"
#include "../common/once.cuh"

constexpr bool ADD = EMBEDDING_ADD;
constexpr int DEEP = EMBEDDING_DEEP;
constexpr int THREADS = 128;

using vec::Bf16;
constexpr int N = vec::PER<Bf16>;
constexpr int SPAN = DEEP * 32 * N;  // columns of a step
using Pack = vec::Group<Bf16, N>;

struct Problem {
    const Bf16* table;
    const Bf16* positions;  // ADD
    const int* ids;
    const int* places;  // ADD
    Bf16* y;
    int rows, width, vocabulary, places_count, each, turns, apart;
};

struct Step {
    Pack a[DEEP], b[DEEP];
    int row, first;  // first column

    __device__ __forceinline__ void load(const Problem& p, int id, int place, int lane) {
        const Bf16* const token = p.table + static_cast<size_t>(max(__shfl_sync(0xffffffffu, id, row), 0)) * p.width;
        const Bf16* const position = ADD ? p.positions + static_cast<size_t>(__shfl_sync(0xffffffffu, place, row)) * p.width : nullptr;
#pragma unroll
        for (int d = 0; d < DEEP; ++d) {
            const int at = min(first + (d * 32 + lane) * N, p.width - N);  // behind the last the last again: loads need no branch
            a[d].template load<vec::Cache::keep>(token + at);
            if (ADD) b[d].template load<vec::Cache::keep>(position + at);
        }
    }

    // `rows`: lane r holds row r of the warp.
    __device__ __forceinline__ void write(const Problem& p, int rows, int id, int lane) {
        const bool good = __shfl_sync(0xffffffffu, id, row) >= 0;
        Bf16* const to = p.y + static_cast<size_t>(__shfl_sync(0xffffffffu, rows, row)) * p.width;
#pragma unroll
        for (int d = 0; d < DEEP; ++d) {
            const int at = first + (d * 32 + lane) * N;
            if (ADD || !good) {
                float sum[N];
#pragma unroll
                for (int i = 0; i < N; ++i) sum[i] = good ? a[d][i] + (ADD ? b[d][i] : 0.0f) : __int_as_float(0x7fffffff);
                a[d].set(sum);
            }
            if (at < p.width) vec::store_once(to + at, a[d]);
        }
    }

    // To the step behind another.
    __device__ __forceinline__ void behind(const Step& other, int width) {
        const bool ends = other.first + SPAN >= width;
        row = ends ? other.row + 1 : other.row;
        first = ends ? 0 : other.first + SPAN;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 6) embedding_forward(const __grid_constant__ Problem p) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = static_cast<int>(blockIdx.x * (THREADS / 32) + ptx::warp_index()) * p.each;
    const int rows = min(p.each, p.rows - first);
    if (rows <= 0) return;
    const int dealt = first + min(lane, rows - 1), turn = dealt / p.turns;
    const int mine = (dealt - turn * p.turns) * p.apart + turn;
    int id = __ldg(p.ids + mine);
    int place = ADD ? __ldg(p.places + mine) : 0;
    const bool placed = !ADD || (place >= 0 && place < p.places_count);
    if (id >= p.vocabulary || !placed) id = -1;
    if (!placed) place = 0;
    Step even, odd;
    even.row = 0;
    even.first = 0;
    even.load(p, id, place, lane);
    while (true) {
        odd.behind(even, p.width);
        if (odd.row < rows) odd.load(p, id, place, lane);
        even.write(p, mine, id, lane);
        if (odd.row >= rows) return;
        even.behind(odd, p.width);
        if (even.row < rows) even.load(p, id, place, lane);
        odd.write(p, mine, id, lane);
        if (even.row >= rows) return;
    }
}
