// Warpgroup matrix instructions: D[64,N] (fp32, registers) += A[64,16] (bf16, shared memory or registers) * B[16,N] (bf16, shared).
//
// Fragment of D in thread t of the warpgroup (w = t/32, l = t%32): d[4j], d[4j+1] are row 16w + l/4, columns 8j + 2(l%4), +1;
// d[4j+2], d[4j+3] the same columns of row + 8. A from registers: a[0] row l/4 columns 2(l%4), +1; a[1] row + 8; a[2] row, columns + 8;
// a[3] row + 8, columns + 8 (so two neighbouring 8-column groups of an accumulator, packed to bf16, are an A fragment of 16 columns).
//
// Use: wgmma_fence(); wgmma_...(...) any number; wgmma_commit(); ... wgmma_wait<0>(). Accumulators must not be touched between the
// first wgmma and the wait.
//
// Shared-memory operands use the 128-byte swizzle, tiles aligned to 1024 bytes.
//   K-major (reduction dimension contiguous, tile [rows][64]): descriptor_k_major(tile) is k 0..15; each further 16 of k adds 32 bytes;
//     rows r0.. of the tile (r0 a multiple of 8) start at r0 * 128 bytes.
//   MN-major (rows of the tile run along k, 64 contiguous M or N elements each; further 64s of M or N follow every `panel_bytes`):
//     descriptor_mn_major(tile, panel_bytes) is k 0..15; each further 16 of k adds 2048 bytes. Set the transpose flag of that operand.
#pragma once
#include <cstdint>

#include "fence.cuh"

namespace ptx {

// Orders register accesses (accumulators, A fragments) before the wgmmas that follow. Whole warpgroup.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of wgmmas issued since the last commit.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most N groups are still running.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Pins a register array at this point: the compiler may not move its accesses across.
template <int COUNT>
__device__ __forceinline__ void pin_registers(float (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void pin_registers(uint32_t (&values)[ROWS][COLUMNS]) {
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS; ++i) asm volatile("" : "+r"(values[i / COLUMNS][i % COLUMNS])::"memory");
}

namespace detail {
constexpr uint64_t SWIZZLE_128B = uint64_t(1) << 62;
__device__ __forceinline__ uint64_t descriptor_field(uint32_t bytes) { return uint64_t((bytes & 0x3ffff) >> 4); }
}  // namespace detail

// Descriptor of a K-major tile (rows of 128 bytes) that starts at shared address `address`: 8-row atoms follow every 1024 bytes.
__device__ __forceinline__ uint64_t descriptor_k_major(uint32_t address) {
    return detail::descriptor_field(address) | (detail::descriptor_field(16) << 16) | (detail::descriptor_field(1024) << 32) |
           detail::SWIZZLE_128B;
}

// Descriptor of an MN-major tile: atoms of 8 k follow every 1024 bytes, panels of 64 M or N every `panel_bytes`.
__device__ __forceinline__ uint64_t descriptor_mn_major(uint32_t address, uint32_t panel_bytes) {
    return detail::descriptor_field(address) | (detail::descriptor_field(panel_bytes) << 16) |
           (detail::descriptor_field(1024) << 32) | detail::SWIZZLE_128B;
}

// The descriptor of the same tile `bytes` further on.
__device__ __forceinline__ uint64_t descriptor_advance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

// Register lists in groups of 8 (16 columns of N): their numbers in the assembly text, and their constraints.
#define ALPHA_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define ALPHA_R1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define ALPHA_R2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define ALPHA_R3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define ALPHA_R4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define ALPHA_R5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define ALPHA_R6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define ALPHA_R7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define ALPHA_R8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define ALPHA_R9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define ALPHA_R10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define ALPHA_R11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define ALPHA_R12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define ALPHA_R13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define ALPHA_R14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define ALPHA_R15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define ALPHA_C0 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define ALPHA_C1 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define ALPHA_C2 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define ALPHA_C3 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define ALPHA_C4 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define ALPHA_C5 "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define ALPHA_C6 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define ALPHA_C7 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define ALPHA_C8 "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define ALPHA_C9 "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define ALPHA_C10 "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define ALPHA_C11 "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define ALPHA_C12 "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define ALPHA_C13 "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define ALPHA_C14 "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define ALPHA_C15 "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#define ALPHA_RS0 ALPHA_R0
#define ALPHA_CS0 ALPHA_C0
#define ALPHA_RS1 ALPHA_RS0 ALPHA_R1
#define ALPHA_CS1 ALPHA_CS0, ALPHA_C1
#define ALPHA_RS2 ALPHA_RS1 ALPHA_R2
#define ALPHA_CS2 ALPHA_CS1, ALPHA_C2
#define ALPHA_RS3 ALPHA_RS2 ALPHA_R3
#define ALPHA_CS3 ALPHA_CS2, ALPHA_C3
#define ALPHA_RS4 ALPHA_RS3 ALPHA_R4
#define ALPHA_CS4 ALPHA_CS3, ALPHA_C4
#define ALPHA_RS5 ALPHA_RS4 ALPHA_R5
#define ALPHA_CS5 ALPHA_CS4, ALPHA_C5
#define ALPHA_RS6 ALPHA_RS5 ALPHA_R6
#define ALPHA_CS6 ALPHA_CS5, ALPHA_C6
#define ALPHA_RS7 ALPHA_RS6 ALPHA_R7
#define ALPHA_CS7 ALPHA_CS6, ALPHA_C7
#define ALPHA_RS8 ALPHA_RS7 ALPHA_R8
#define ALPHA_CS8 ALPHA_CS7, ALPHA_C8
#define ALPHA_RS9 ALPHA_RS8 ALPHA_R9
#define ALPHA_CS9 ALPHA_CS8, ALPHA_C9
#define ALPHA_RS10 ALPHA_RS9 ALPHA_R10
#define ALPHA_CS10 ALPHA_CS9, ALPHA_C10
#define ALPHA_RS11 ALPHA_RS10 ALPHA_R11
#define ALPHA_CS11 ALPHA_CS10, ALPHA_C11
#define ALPHA_RS12 ALPHA_RS11 ALPHA_R12
#define ALPHA_CS12 ALPHA_CS11, ALPHA_C12
#define ALPHA_RS13 ALPHA_RS12 ALPHA_R13
#define ALPHA_CS13 ALPHA_CS12, ALPHA_C13
#define ALPHA_RS14 ALPHA_RS13 ALPHA_R14
#define ALPHA_CS14 ALPHA_CS13, ALPHA_C14
#define ALPHA_RS15 ALPHA_RS14 ALPHA_R15
#define ALPHA_CS15 ALPHA_CS14, ALPHA_C15

// One case of N: REGS and CONSTRAINTS list N/2 accumulators; the operands that follow are numbered from N/2.
#define ALPHA_WGMMA_SS(N, REGS, CONSTRAINTS, P0, P1, P2, P3, P4)                                              \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #P2 ", 0;\n"                                          \
                 " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS "}, %" #P0 ", %" #P1      \
                 ", p, 1, 1, %" #P3 ", %" #P4 ";\n}\n"                                                        \
                 : CONSTRAINTS                                                                                \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B))
#define ALPHA_WGMMA_RS(N, REGS, CONSTRAINTS, P0, P1, P2, P3, P4, P5, P6)                                      \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #P5 ", 0;\n"                                          \
                 " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS "}, {%" #P0 ", %" #P1     \
                 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, %" #P6 ";\n}\n"                                   \
                 : CONSTRAINTS                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANSPOSE_B))

// D = A B (+ D if `accumulate` is not 0), both operands in shared memory; d holds N/2 floats.
// TRANSPOSE_A / TRANSPOSE_B are 1 for MN-major operands.
template <int N, int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
    static_assert(N == 64 || N == 96 || N == 128 || N == 192 || N == 256, "the widths that kernels use");
    if constexpr (N == 64) ALPHA_WGMMA_SS(64, ALPHA_RS3, ALPHA_CS3, 32, 33, 34, 35, 36);
    else if constexpr (N == 96) ALPHA_WGMMA_SS(96, ALPHA_RS5, ALPHA_CS5, 48, 49, 50, 51, 52);
    else if constexpr (N == 128) ALPHA_WGMMA_SS(128, ALPHA_RS7, ALPHA_CS7, 64, 65, 66, 67, 68);
    else if constexpr (N == 192) ALPHA_WGMMA_SS(192, ALPHA_RS11, ALPHA_CS11, 96, 97, 98, 99, 100);
    else if constexpr (N == 256) ALPHA_WGMMA_SS(256, ALPHA_RS15, ALPHA_CS15, 128, 129, 130, 131, 132);
}

// D = A B (+ D if `accumulate` is not 0), A in registers (K-major fragment), B in shared memory.
template <int N, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    static_assert(N == 64 || N == 128, "the widths that kernels use");
    if constexpr (N == 64) ALPHA_WGMMA_RS(64, ALPHA_RS3, ALPHA_CS3, 32, 33, 34, 35, 36, 37, 38);
    else if constexpr (N == 128) ALPHA_WGMMA_RS(128, ALPHA_RS7, ALPHA_CS7, 64, 65, 66, 67, 68, 69, 70);
}

#undef ALPHA_WGMMA_SS
#undef ALPHA_WGMMA_RS

}  // namespace ptx
