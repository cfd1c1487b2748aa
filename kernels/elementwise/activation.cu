// GELU and SwiGLU (silu(gate) * up) and their backward passes, elementwise, bf16.
//
// Compile-time parameters
//   ACT_OP    0: gelu y = gelu(a);  1: gelu_bwd y = dy gelu'(a);  2: swiglu y = silu(a) b;
//             3: swiglu_bwd y = dy b silu'(a), y2 = dy silu(a)
//   ACT_ERF   0: tanh form;  1: erf form (GELU)
//
// Work. Matrices of `columns` (a multiple of 8) with a stride each, so that gate and up may be halves of one packed matrix. A thread takes
//   one vector of 16 bytes: many short CTAs beat more loads in flight. Elements are independent. No barrier.
// Bytes. Each input and output once; outputs leave L2 first (common/once.cuh). Registers: 4 per input, about 24 the rest.
#include "../common/activation.cuh"
#include "../common/once.cuh"

constexpr int OP = ACT_OP;
constexpr bool ERF = ACT_ERF;
constexpr int THREADS = 256;
constexpr bool HAS_DY = OP == 1 || OP == 3;
constexpr bool HAS_B = OP >= 2;

using vec::Bf16;
constexpr int N = vec::PER<Bf16>;
using Pack = vec::Group<Bf16, N>;

struct Problem {
    const Bf16* dy;
    const Bf16* a;
    const Bf16* b;
    Bf16* y;
    Bf16* y2;
    long long dy_stride, a_stride, b_stride, y_stride, y2_stride;  // elements between rows
    unsigned int vectors;                                          // rows * columns / N, below 2^31
    vec::Divisor per_row;                                          // columns / N
};

extern "C" __global__ void __launch_bounds__(THREADS, 4) activation_map(const __grid_constant__ Problem p) {
    const unsigned int first = blockIdx.x * THREADS + threadIdx.x;
    // past the end the last vector is loaded again and not written: loads need no branch
    const unsigned int v = min(first, p.vectors - 1);
    const unsigned int row = p.per_row.quotient(v);
    const unsigned int column = (v - row * p.per_row.value) * N;
    Pack dy, a, b;
    a.load(p.a + row * p.a_stride + column);
    if (HAS_B) b.load(p.b + row * p.b_stride + column);
    if (HAS_DY) dy.load(p.dy + row * p.dy_stride + column);
    if (first >= p.vectors) return;
    float y[N], y2[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float x = a[i];
        if (OP == 0) y[i] = ERF ? activation::gelu_erf(x) : activation::gelu_tanh<false>(x);
        if (OP == 1) y[i] = dy[i] * (ERF ? activation::gelu_erf_gradient(x) : activation::gelu_tanh_gradient<false>(x));
        if (OP == 2) y[i] = activation::silu(x) * b[i];
        if (OP == 3) {
            const float s = activation::sigmoid(x);
            y[i] = dy[i] * b[i] * fmaf(x * s, 1.0f - s, s);
            y2[i] = dy[i] * (x * s);
        }
    }
    Pack out;
    out.set(y);
    vec::store_once(p.y + row * p.y_stride + column, out);
    if (OP == 3) {
        out.set(y2);
        vec::store_once(p.y2 + row * p.y2_stride + column, out);
    }
}
