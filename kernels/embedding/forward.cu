// Embedding forward: y[n] = table[id[n]], or table[id[n]] + positions[place[n]] rounded once (token and position embedding in one pass).
//   place[n] = n % period where no array of places is given. An id or place outside its table makes the row NaN, so that the loss shows it.
//
// Compile-time parameters: EMBEDDING_F32 0: bf16;  1: fp32.  EMBEDDING_ADD 1: adds the position's row.  EMBEDDING_DEEP: vectors in flight.
//
// Work. A warp per ROWS rows, 8 warps per CTA; a lane takes vectors lane, + 32, ... of 16 bytes of each row, DEEP in flight of each.
//   Bits depend on nothing but data.
// Bytes: the row read and written (2 C element sizes) + 4 per id; positions come from L2. No barrier.
#include "../common/vector.cuh"

constexpr bool ADD = EMBEDDING_ADD;
constexpr int DEEP = EMBEDDING_DEEP;
constexpr int ROWS = 2;

using T = vec::Element<EMBEDDING_F32 != 0>::type;
constexpr int N = vec::PER<T>;
using Pack = vec::Group<T, N>;

struct Problem {
    const T* table;
    const T* positions;  // ADD
    const int* ids;
    const int* places;  // ADD: or null
    T* y;
    int rows, width, vocabulary, places_count, period;
};

extern "C" __global__ void __launch_bounds__(256, 3) embedding_forward(const __grid_constant__ Problem p) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row0 = (static_cast<int>(blockIdx.x) * 8 + static_cast<int>(threadIdx.x) / 32) * ROWS;
    if (row0 >= p.rows) return;
    const T* token[ROWS];
    const T* position[ROWS];
    bool good[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {  // a row behind the last is the last again and is not written
        const int row = min(row0 + r, p.rows - 1);
        const int id = __ldg(p.ids + row);
        const int place = ADD ? (p.places != nullptr ? __ldg(p.places + row) : row % p.period) : 0;
        const bool placed = ADD && place >= 0 && place < p.places_count;
        good[r] = id >= 0 && id < p.vocabulary && (!ADD || placed);
        token[r] = p.table + static_cast<size_t>(good[r] ? id : 0) * p.width;
        position[r] = ADD ? p.positions + static_cast<size_t>(placed ? place : 0) * p.width : nullptr;
    }
    for (int column = lane * N; column < p.width; column += DEEP * 32 * N) {
        Pack a[ROWS][DEEP], b[ROWS][DEEP];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int d = 0; d < DEEP; ++d) {
                const int at = column + d * 32 * N < p.width ? column + d * 32 * N : column;  // loads need no branch
                a[r][d].load<vec::Cache::keep>(token[r] + at);
                if (ADD) b[r][d].load<vec::Cache::keep>(position[r] + at);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int d = 0; d < DEEP; ++d) {
                if (row0 + r < p.rows && column + d * 32 * N < p.width) {
                    if (ADD || !good[r]) {
                        float sum[N];
#pragma unroll
                        for (int i = 0; i < N; ++i) sum[i] = good[r] ? a[r][d][i] + (ADD ? b[r][d][i] : 0.0f) : __int_as_float(0x7fffffff);
                        a[r][d].set(sum);
                    }
                    a[r][d].store(p.y + static_cast<size_t>(row0 + r) * p.width + column + d * 32 * N);
                }
            }
        }
    }
}
