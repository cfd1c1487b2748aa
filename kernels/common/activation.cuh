// GELU and SiLU and their derivatives in fp32, for results in bf16: exponentials and quotients are one instruction each (relative errors
// below 2^-21).
//
// GELU's tanh form: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) = x sigmoid(z), z = 2 sqrt(2 / pi) (x + 0.044715 x^3). It comes in
// two roundings. FOLDED takes -log2(e) into the polynomial's coefficients, which saves a multiplication: the epilogue of a product is
// straight-line code over its accumulators, and its length is its cost. Elementwise kernels wait for memory and keep z as it is written.
#pragma once
#include "math.cuh"

namespace activation {

using ptx::LOG2_E;
constexpr float ROOT_HALF = 0.70710678118654752f;
constexpr float GELU_A = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float GELU_B = 1.5957691216057308f * 0.044715f;

// 1 / (1 + 2^t): the sigmoid of z where t = -log2(e) z.
__device__ __forceinline__ float sigmoid_base2(float t) { return ptx::reciprocal_approx(1.0f + ptx::exp2_approx(t)); }

__device__ __forceinline__ float sigmoid(float z) { return sigmoid_base2(-LOG2_E * z); }

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

template <bool FOLDED>
__device__ __forceinline__ float gelu_tanh_sigmoid(float x) {
    if constexpr (FOLDED) {
        return sigmoid_base2(x * fmaf(x * x, -LOG2_E * GELU_B, -LOG2_E * GELU_A));
    } else {
        return sigmoid(x * fmaf(x * x, GELU_B, GELU_A));
    }
}

template <bool FOLDED>
__device__ __forceinline__ float gelu_tanh(float x) {
    return x * gelu_tanh_sigmoid<FOLDED>(x);
}

// s + x s (1 - s) z', s = sigmoid(z). Beyond 64 the derivative is 0 or 1, and x^3 would overflow. NaN and infinity, which the clamp would
// swallow, give NaN (y - y).
template <bool FOLDED>
__device__ __forceinline__ float gelu_tanh_gradient(float y) {
    const float x = fminf(fmaxf(y, -64.0f), 64.0f);
    const float square = x * x;
    const float s = gelu_tanh_sigmoid<FOLDED>(x);
    return fmaf(x * fmaf(square, 3.0f * GELU_B, GELU_A), fmaf(-s, s, s), s) + (y - y);
}

__device__ __forceinline__ float gelu_erf(float x) { return 0.5f * x * (1.0f + erff(x * ROOT_HALF)); }

__device__ __forceinline__ float gelu_erf_gradient(float x) {
    const float density = 0.3989422804014327f * ptx::exp2_approx(LOG2_E * (-0.5f * x * x));
    // beyond 64 the density is 0, and 0 times an overflown x must be 0; NaN and infinity give NaN (x - x)
    return fmaf(fminf(fmaxf(x, -64.0f), 64.0f), density, 0.5f * (1.0f + erff(x * ROOT_HALF))) + (x - x);
}

}  // namespace activation
