// GELU and SwiGLU (silu(gate) * up) and their backward passes, elementwise.
//
// Compile-time parameters
//   ACT_OP    0: gelu y = gelu(a);  1: gelu_bwd y = dy gelu'(a);  2: swiglu y = silu(a) b;  3: swiglu_bwd y = dy b silu'(a), y2 = dy silu(a)
//   ACT_ERF   0: tanh form;  1: erf form (GELU)
//   ACT_F32   0: bf16;  1: fp32
//   ACT_DEEP  vectors of a thread
//
// Work. Matrices of `columns` (a multiple of 8) with a stride each, so that gate and up may be halves of one packed matrix. A thread takes
//   DEEP vectors of 16 bytes, a CTA's width apart, all loads before the first use. Elements are independent. No barrier.
// Bytes. Each input and output once; outputs leave L2 first (common/once.cuh). Registers: 4 DEEP per input, about 24 the rest.
#include "../common/activation.cuh"
#include "../common/once.cuh"

constexpr int OP = ACT_OP;
constexpr bool ERF = ACT_ERF;
constexpr bool FAST = !ACT_F32;
constexpr int THREADS = 256;
constexpr int DEEP = ACT_DEEP;
constexpr bool HAS_DY = OP == 1 || OP == 3;
constexpr bool HAS_B = OP >= 2;

using T = vec::Element<ACT_F32 != 0>::type;
constexpr int N = vec::PER<T>;
using Pack = vec::Group<T, N>;

struct Problem {
    const T* dy;
    const T* a;
    const T* b;
    T* y;
    T* y2;
    long long dy_stride, a_stride, b_stride, y_stride, y2_stride;  // elements between rows
    unsigned int vectors;                                          // rows * columns / N, below 2^31
    vec::Divisor per_row;                                          // columns / N
};

extern "C" __global__ void __launch_bounds__(THREADS, 4) activation_map(const __grid_constant__ Problem p) {
    const unsigned int first = blockIdx.x * (THREADS * DEEP) + threadIdx.x;
    Pack dy[DEEP], a[DEEP], b[DEEP];
    unsigned int row[DEEP], column[DEEP];
#pragma unroll
    for (int d = 0; d < DEEP; ++d) {
        // past the end the last vector is loaded again and not written: loads need no branch
        const unsigned int v = min(first + d * THREADS, p.vectors - 1);
        row[d] = p.per_row.quotient(v);
        column[d] = (v - row[d] * p.per_row.value) * N;
        a[d].load(p.a + row[d] * p.a_stride + column[d]);
        if (HAS_B) b[d].load(p.b + row[d] * p.b_stride + column[d]);
        if (HAS_DY) dy[d].load(p.dy + row[d] * p.dy_stride + column[d]);
    }
#pragma unroll
    for (int d = 0; d < DEEP; ++d) {
        if (first + d * THREADS >= p.vectors) return;
        float y[N], y2[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float x = a[d][i];
            if (OP == 0) y[i] = ERF ? activation::gelu_erf(x) : activation::gelu_tanh<FAST>(x);
            if (OP == 1) y[i] = dy[d][i] * (ERF ? activation::gelu_erf_gradient<FAST>(x) : activation::gelu_tanh_gradient<FAST>(x));
            if (OP == 2) y[i] = activation::silu<FAST>(x) * b[d][i];
            if (OP == 3) {
                const float s = activation::sigmoid<FAST>(x);
                y[i] = dy[d][i] * b[d][i] * fmaf(x * s, 1.0f - s, s);
                y2[i] = dy[d][i] * (x * s);
            }
        }
        Pack out;
        out.set(y);
        vec::store_once(p.y + row[d] * p.y_stride + column[d], out);
        if (OP == 3) {
            out.set(y2);
            vec::store_once(p.y2 + row[d] * p.y2_stride + column[d], out);
        }
    }
}
