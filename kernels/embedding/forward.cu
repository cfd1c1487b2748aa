// Embedding forward: y[n] = table[id[n]], or table[id[n]] + positions[place[n]] rounded once (token and position embedding in one pass).
//   place[n] = n % period where no array of places is given. An id or place outside its table makes the row NaN, so that the loss shows it.
//
// Compile-time parameters: EMBEDDING_F32 0: bf16;  1: fp32.  EMBEDDING_ADD 1: adds the position's row.
//
// Work. A warp per row, eight rows per CTA; a lane takes vectors lane, + 32, ... of 16 bytes, four in flight. Bits depend on nothing but data.
// Bytes: the row read and written (2 C element sizes) + 4 per id; positions come from L2. No barrier.
#include "../common/vector.cuh"

constexpr bool ADD = EMBEDDING_ADD;
constexpr int DEEP = 4;

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

extern "C" __global__ void __launch_bounds__(256, 4) embedding_forward(const __grid_constant__ Problem p) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = static_cast<int>(blockIdx.x) * 8 + static_cast<int>(threadIdx.x) / 32;
    if (row >= p.rows) return;
    const int id = __ldg(p.ids + row);
    const int place = ADD ? (p.places != nullptr ? __ldg(p.places + row) : row % p.period) : 0;
    const bool good = id >= 0 && id < p.vocabulary && (!ADD || (place >= 0 && place < p.places_count));
    const T* const token = p.table + static_cast<size_t>(good ? id : 0) * p.width;
    const T* const position = ADD ? p.positions + static_cast<size_t>(good ? place : 0) * p.width : nullptr;
    T* const y = p.y + static_cast<size_t>(row) * p.width;
    const float spoil = good ? 0.0f : __int_as_float(0x7fffffff);
    const auto finish = [&](Pack& a, const Pack& b, int column) {
        if (ADD || !good) {
            float sum[N];
#pragma unroll
            for (int i = 0; i < N; ++i) sum[i] = good ? a[i] + (ADD ? b[i] : 0.0f) : spoil;
            a.set(sum);
        }
        a.store(y + column);
    };
    int column = lane * N;
    for (; column + (DEEP - 1) * 32 * N < p.width; column += DEEP * 32 * N) {
        Pack a[DEEP], b[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; ++d) {
            a[d].load<vec::Cache::keep>(token + column + d * 32 * N);
            if (ADD) b[d].load<vec::Cache::keep>(position + column + d * 32 * N);
        }
#pragma unroll
        for (int d = 0; d < DEEP; ++d) finish(a[d], b[d], column + d * 32 * N);
    }
#pragma unroll 3
    for (; column < p.width; column += 32 * N) {
        Pack a, b;
        a.load<vec::Cache::keep>(token + column);
        if (ADD) b.load<vec::Cache::keep>(position + column);
        finish(a, b, column);
    }
}
