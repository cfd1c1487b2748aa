// Rotary position embedding, bf16, of the first `heads` heads of each row, in place or not (packed QKV: query and key heads lie side by
//   side). Pair i of a head turns by the angle of its position: (a, b) -> (a cos - b sin, b cos + a sin); INVERSE turns back.
//
// Compile-time parameters: ROPE_LAYOUT 0: pairs (i, i + D/2);  1: pairs (2i, 2i + 1).  ROPE_INVERSE.
//   ROPE_DEEP: heads of a thread in flight.
//
// rope_table  cos and sin of position * base^(-2i/D) in double precision, rounded to fp32: table[position][i]. Once per run: an angle of
//             fp32 is off by position * 2^-24, too much from about position 1,000 on.
// rope        Work. A thread owns 2 N neighbouring elements' worth of pairs (N = 8: two 16-byte vectors of a head) of one
//             row, keeps their cos and sin in registers and walks over heads; LANES = D / (2 N) threads cover a head, a warp covers
//             32 / LANES heads of one row at a time. DEEP heads in flight. Elements are independent: bits depend on nothing else.
//             Bytes. 4 D heads per row; the table's row (4 D) comes from L2, which outputs leave first
//             (common/once.cuh). Registers: 2 N cos and sin, 32 in flight.
//             No barrier. A position outside the table makes the row NaN.
#include "../common/once.cuh"

constexpr bool INTERLEAVED = ROPE_LAYOUT;
constexpr bool INVERSE = ROPE_INVERSE;
constexpr int DEEP = ROPE_DEEP;
constexpr int THREADS = 128;  // of rope

using vec::Bf16;
constexpr int N = vec::PER<Bf16>;
using Pack = vec::Group<Bf16, N>;

extern "C" __global__ void __launch_bounds__(256) rope_table(float2* table, double base, int positions, int half) {
    const long long at = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (at >= static_cast<long long>(positions) * half) return;
    const int pair = static_cast<int>(at % half);
    const double angle = static_cast<double>(at / half) * pow(base, -static_cast<double>(pair) / half);
    table[at] = make_float2(static_cast<float>(cos(angle)), static_cast<float>(sin(angle)));
}

struct Problem {
    const Bf16* x;
    Bf16* y;
    const int* positions;
    const float2* table;             // [table_rows][head_dim / 2]
    long long x_stride, y_stride;    // elements between rows
    int rows, heads, head_dim, table_rows;
    int lanes;  // head_dim / (2 N), a power of two up to 32, or any other number (then a warp's last lanes idle)
};

extern "C" __global__ void __launch_bounds__(THREADS, 4) rope(const __grid_constant__ Problem p) {
    const int row = static_cast<int>(blockIdx.x) * (THREADS / 32) + static_cast<int>(threadIdx.x) / 32;
    if (row >= p.rows) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int abreast = 32 / p.lanes;
    const int part = lane % p.lanes, first = lane / p.lanes;
    if (first >= abreast) return;
    const int half = p.head_dim / 2;
    const int position = __ldg(p.positions + row);
    const bool good = position >= 0 && position < p.table_rows;
    const float2* const angles = p.table + static_cast<size_t>(good ? position : 0) * half + part * N;
    float cosine[N], sine[N];
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        vec::Group<float, 4> turn;
        turn.load<vec::Cache::keep>(reinterpret_cast<const float*>(angles + i));
        cosine[i] = turn[0];
        sine[i] = INVERSE ? -turn[1] : turn[1];
        cosine[i + 1] = turn[2];
        sine[i + 1] = INVERSE ? -turn[3] : turn[3];
    }
    if (!good) {
#pragma unroll
        for (int i = 0; i < N; ++i) cosine[i] = __int_as_float(0x7fffffff);
    }
    const Bf16* const x = p.x + row * p.x_stride;
    Bf16* const y = p.y + row * p.y_stride;
    const int at0 = INTERLEAVED ? 2 * part * N : part * N;
    const int apart = INTERLEAVED ? N : half;
    const auto turn = [&](Pack& a, Pack& b) {
        float u[N], v[N];
        if (INTERLEAVED) {  // a holds pairs 0 .. N/2 - 1, b the rest
#pragma unroll
            for (int i = 0; i < N; i += 2) {
                u[i] = a[i] * cosine[i / 2] - a[i + 1] * sine[i / 2];
                u[i + 1] = a[i + 1] * cosine[i / 2] + a[i] * sine[i / 2];
                v[i] = b[i] * cosine[(N + i) / 2] - b[i + 1] * sine[(N + i) / 2];
                v[i + 1] = b[i + 1] * cosine[(N + i) / 2] + b[i] * sine[(N + i) / 2];
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                u[i] = a[i] * cosine[i] - b[i] * sine[i];
                v[i] = b[i] * cosine[i] + a[i] * sine[i];
            }
        }
        a.set(u);
        b.set(v);
    };
    int head = first;
    for (; head + (DEEP - 1) * abreast < p.heads; head += DEEP * abreast) {
        Pack a[DEEP], b[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; ++d) {
            const int at = (head + d * abreast) * p.head_dim + at0;
            a[d].load(x + at);
            b[d].load(x + at + apart);
        }
#pragma unroll
        for (int d = 0; d < DEEP; ++d) {
            const int at = (head + d * abreast) * p.head_dim + at0;
            turn(a[d], b[d]);
            vec::store_once(y + at, a[d]);
            vec::store_once(y + at + apart, b[d]);
        }
    }
#pragma unroll 2
    for (; head < p.heads; head += abreast) {
        const int at = head * p.head_dim + at0;
        Pack a, b;
        a.load(x + at);
        b.load(x + at + apart);
        turn(a, b);
        vec::store_once(y + at, a);
        vec::store_once(y + at + apart, b);
    }
}
