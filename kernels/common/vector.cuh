// Groups of neighbouring elements, moved in 16-byte (or 8-byte) accesses and computed on as floats. Element types: Bf16, float.
#pragma once
#include <cstdint>

#include "bf16.cuh"

namespace vec {

// A bfloat16 in memory; arithmetic happens in float.
struct Bf16 {
    uint16_t bits;
};

template <bool WIDE>
struct Element {
    using type = Bf16;
};
template <>
struct Element<true> {
    using type = float;
};

// Which cache a load should trouble. Loads are not volatile, so that the compiler may hoist them over arithmetic and stores: a thread loads
// a place before it writes it, never after, and no other thread of the launch writes it.
enum class Cache {
    stream,  // read once by this kernel: past L1. The memory may be written by this kernel (in-place work)
    keep,    // read by many threads, never written by this kernel: through L1's read-only path
};

template <Cache CACHE>
__device__ __forceinline__ uint4 load16(const void* p) {
    uint4 r;
    if constexpr (CACHE == Cache::stream) {
        asm("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
    } else {
        asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
    }
    return r;
}

template <Cache CACHE>
__device__ __forceinline__ uint2 load8(const void* p) {
    uint2 r;
    if constexpr (CACHE == Cache::stream) {
        asm("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p));
    } else {
        asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p));
    }
    return r;
}

__device__ __forceinline__ void store16(void* p, uint4 r) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w) : "memory");
}

__device__ __forceinline__ void store8(void* p, uint2 r) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(r.x), "r"(r.y) : "memory");
}

__device__ __forceinline__ float as_float(Bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
__device__ __forceinline__ float as_float(float x) { return x; }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ Bf16 from_float<Bf16>(float x) {
    return Bf16{static_cast<uint16_t>(ptx::pack_bf16(x, 0.0f) & 0xffffu)};
}

// x rounded to T and back.
template <typename T>
__device__ __forceinline__ float rounded(float x) {
    return as_float(from_float<T>(x));
}

// N neighbouring elements of T as they lie in memory. The address is a multiple of min(16, N * sizeof(T)) bytes.
template <typename T, int N>
struct Group {
    static constexpr int WORDS = N * static_cast<int>(sizeof(T)) / 4;
    static_assert(WORDS == 2 || WORDS % 4 == 0, "8 bytes or a multiple of 16");
    uint32_t word[WORDS];

    template <Cache CACHE = Cache::stream>
    __device__ __forceinline__ void load(const T* p) {
        if constexpr (WORDS == 2) {
            const uint2 r = load8<CACHE>(p);
            word[0] = r.x;
            word[1] = r.y;
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4) {
                const uint4 r = load16<CACHE>(reinterpret_cast<const uint8_t*>(p) + 4 * i);
                word[i] = r.x;
                word[i + 1] = r.y;
                word[i + 2] = r.z;
                word[i + 3] = r.w;
            }
        }
    }

    __device__ __forceinline__ void store(T* p) const {
        if constexpr (WORDS == 2) {
            store8(p, make_uint2(word[0], word[1]));
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4)
                store16(reinterpret_cast<uint8_t*>(p) + 4 * i, make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]));
        }
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) word[i] = 0;
    }

    // Makes the compiler take the words for new ones, so that it unpacks them again instead of keeping N floats alive.
    __device__ __forceinline__ void unpack_anew() {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) asm volatile("" : "+r"(word[i]));
    }

    // Element i (a compile-time constant after unrolling).
    __device__ __forceinline__ float operator[](int i) const {
        if constexpr (sizeof(T) == 4) {
            return __uint_as_float(word[i]);
        } else {
            return __uint_as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16);
        }
    }

    __device__ __forceinline__ void set(const float (&value)[N]) {
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int i = 0; i < N; ++i) word[i] = __float_as_uint(value[i]);
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 2) word[i / 2] = ptx::pack_bf16(value[i], value[i + 1]);
        }
    }
};

// Elements of 16 bytes.
template <typename T>
constexpr int PER = 16 / static_cast<int>(sizeof(T));

// 16 bytes as elements.
template <typename T>
__device__ __forceinline__ Group<T, PER<T>> group(uint4 r) {
    Group<T, PER<T>> elements;
    elements.word[0] = r.x;
    elements.word[1] = r.y;
    elements.word[2] = r.z;
    elements.word[3] = r.w;
    return elements;
}

// Exact quotient of n < 2^31 by a divisor of 1..2^31-1 that the host prepared: multiplier = floor(2^32 (2^shift - d) / d) + 1,
// shift = ceil(log2 d) (Granlund and Montgomery 1994, figure 4.1).
struct Divisor {
    uint32_t multiplier, shift, value;
    __device__ __forceinline__ uint32_t quotient(uint32_t n) const { return (__umulhi(multiplier, n) + n) >> shift; }
};

}  // namespace vec
