// GELU and SiLU and their derivatives in fp32. FAST: exponentials and quotients of one instruction each (errors below 2^-21, for bf16
// results); otherwise the library's.
#pragma once
#include "math.cuh"

namespace activation {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float ROOT_HALF = 0.70710678118654752f;
constexpr float GELU_A = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float GELU_B = 1.5957691216057308f * 0.044715f;

template <bool FAST>
__device__ __forceinline__ float sigmoid(float z) {
    if constexpr (FAST) {
        return ptx::reciprocal_approx(1.0f + ptx::exp2_approx(-LOG2_E * z));
    } else {
        return 1.0f / (1.0f + expf(-z));
    }
}

template <bool FAST>
__device__ __forceinline__ float silu(float x) {
    return x * sigmoid<FAST>(x);
}

// Tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x sigmoid(2 sqrt(2/pi) (...)).
template <bool FAST>
__device__ __forceinline__ float gelu_tanh(float x) {
    return x * sigmoid<FAST>(x * fmaf(x * x, GELU_B, GELU_A));
}

// Beyond 64 the derivative is 0 or 1, and x^3 would overflow. NaN and infinity, which the clamp would swallow, give NaN (y - y).
template <bool FAST>
__device__ __forceinline__ float gelu_tanh_gradient(float y) {
    const float x = fminf(fmaxf(y, -64.0f), 64.0f);
    const float s = sigmoid<FAST>(x * fmaf(x * x, GELU_B, GELU_A));
    return fmaf(x * fmaf(x * x, 3.0f * GELU_B, GELU_A), fmaf(-s, s, s), s) + (y - y);
}

__device__ __forceinline__ float gelu_erf(float x) { return 0.5f * x * (1.0f + erff(x * ROOT_HALF)); }

template <bool FAST>
__device__ __forceinline__ float gelu_erf_gradient(float x) {
    const float square = -0.5f * x * x;
    const float density = 0.3989422804014327f * (FAST ? ptx::exp2_approx(LOG2_E * square) : expf(square));
    // beyond 64 the density is 0, and 0 times an overflown x must be 0; NaN and infinity give NaN (x - x)
    return fmaf(fminf(fmaxf(x, -64.0f), 64.0f), density, 0.5f * (1.0f + erff(x * ROOT_HALF))) + (x - x);
}

}  // namespace activation
