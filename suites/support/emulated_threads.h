// CUDA C++ on a CPU: what device code asks of the compiler and of the hardware, for g++ (emulated_threads.py). Each thread of a block is a
// fiber, and blocks run one after the other. A fiber gives its place away only where it waits, so a run is one order of the threads out of
// many; `order` of emu_launch chooses among three. Shared memory is full of NaN when a block begins. Warps have 32 lanes, blocks are
// one-dimensional and have at most 1,024 threads. Masks of warp functions are taken for full.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>
#include "fibers.h"

// -- the language ---------------------------------------------------------------------------------------------------------------------
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks come one after the other, so one copy does

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct EmuDim { unsigned x = 1, y = 1, z = 1; };
inline EmuDim threadIdx, blockIdx, blockDim, gridDim;

// -- functions of one thread ----------------------------------------------------------------------------------------------------------
using std::isfinite;
using std::max;
using std::min;
inline unsigned min(unsigned a, int b) { return a < (unsigned)b ? a : (unsigned)b; }
inline long long min(long long a, int b) { return a < b ? a : b; }
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class To, class From> inline To emu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}
inline float __uint_as_float(uint32_t u) { return emu_bits<float>(u); }
inline float __int_as_float(int i) { return emu_bits<float>(i); }
inline uint32_t __float_as_uint(float f) { return emu_bits<uint32_t>(f); }
inline int __float_as_int(float f) { return emu_bits<int>(f); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }
inline int __popc(uint32_t u) { return __builtin_popcount(u); }
inline double cospi(double x) { return cos(M_PI * x); }
inline void __threadfence() {}  // one processor: what was written is seen
inline int atomicAdd(int* p, int v) {
    const int was = *p;
    *p += v;
    return was;
}

// -- dynamic shared memory: an address of shared memory is the distance from its start ------------------------------------------------
inline char* emu_dynamic;
inline size_t emu_dynamic_bytes;
inline uint32_t __cvta_generic_to_shared(const void* p) { return (uint32_t)((char*)p - emu_dynamic); }

[[noreturn]] inline void emu_refuse(const char* what, const char* then) {
    fprintf(stderr, "emulated threads: %s. do: %s\n", what, then);
    abort();
}

// cp.async: the first `bytes` of 16 are copied, at once, and the others are zero.
inline void emu_copy(uint32_t slot, const void* from, int bytes) {
    if (slot + 16 > emu_dynamic_bytes) emu_refuse("a copy beyond the dynamic shared memory", "look at the kernel's slots and shared_bytes");
    memset(emu_dynamic + slot, 0, 16);
    memcpy(emu_dynamic + slot, from, bytes);
}

// cvt.rn.bf16.f32: to the nearest, ties to even; NaN is 0x7fff.
inline uint32_t emu_bf16(float x) {
    const uint32_t u = __float_as_uint(x);
    return x != x ? 0x7fff : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

// max.bf16 of the lower halves; where one is NaN, the other.
inline uint32_t emu_max_bf16(uint32_t a, uint32_t b) {
    return __float_as_uint(fmaxf(__uint_as_float(a << 16), __uint_as_float(b << 16))) >> 16;
}

// -- threads of a block ---------------------------------------------------------------------------------------------------------------
constexpr int EMU_STACK = 64 << 10;  // bytes
constexpr int EMU_WARP = 32;
constexpr int EMU_MOST = 1024;       // threads of a block
constexpr int EMU_NAMED = 16;        // barriers of a block that have numbers

// Threads that came to a barrier, and how often it let all of them go.
struct EmuBarrier { int came = 0; unsigned turn = 0; };

struct EmuBlock {
    int threads = 0, current = -1, live = 0;  // `live`: threads that have not returned
    ucontext_t scheduler;
    std::vector<ucontext_t> contexts;
    std::vector<char> stacks, done;
    std::vector<int> warp_live;
    EmuBarrier all;
    std::vector<EmuBarrier> warps;
    uint32_t exchanged[EMU_MOST];  // what each lane shows its warp
    char blocked[EMU_MOST];        // waits at a barrier of the block
    void (*kernel)(void*);
    void* arguments;
};
inline EmuBlock emu_block;
inline EmuBarrier emu_named[EMU_NAMED];  // bar.sync: whoever comes says how many threads it waits for

inline void emu_yield() { swapcontext(&emu_block.contexts[emu_block.current], &emu_block.scheduler); }

// Whether this was the last of `threads` that the barrier waits for.
inline bool emu_last(EmuBarrier& barrier, int threads) {
    if (++barrier.came < threads) return false;
    barrier.came = 0;
    ++barrier.turn;
    return true;
}
inline void emu_wait(const EmuBarrier& barrier) {
    const unsigned turn = barrier.turn;
    while (barrier.turn == turn) emu_yield();
}
// A barrier of the block: who waits here is `blocked`, which lets another warp run ahead (order 1).
inline void emu_wait_blocked(const EmuBarrier& barrier) {
    const int me = emu_block.current;
    emu_block.blocked[me] = 1;
    emu_wait(barrier);
    emu_block.blocked[me] = 0;
}
inline void __syncthreads() {
    if (!emu_last(emu_block.all, emu_block.live)) emu_wait_blocked(emu_block.all);
}
inline void emu_named_barrier(uint32_t id, uint32_t threads) {
    if (!emu_last(emu_named[id], (int)threads)) emu_wait_blocked(emu_named[id]);
}
inline void __syncwarp() {
    const int warp = emu_block.current / EMU_WARP;
    if (!emu_last(emu_block.warps[warp], emu_block.warp_live[warp])) emu_wait(emu_block.warps[warp]);
}

// -- functions of a warp --------------------------------------------------------------------------------------------------------------
inline int emu_lane() { return emu_block.current % EMU_WARP; }

// Calls of(lane, word) for what each lane of this warp shows: all have shown it before, and all have seen it behind.
template <class F> inline void emu_seen(uint32_t shown, F of) {
    emu_block.exchanged[emu_block.current] = shown;
    __syncwarp();
    const int first = emu_block.current / EMU_WARP * EMU_WARP;
    for (int lane = 0; lane < EMU_WARP && first + lane < emu_block.threads; ++lane) of(lane, emu_block.exchanged[first + lane]);
    __syncwarp();
}
template <class T> inline T emu_shuffle(T value, int from) {
    emu_block.exchanged[emu_block.current] = emu_bits<uint32_t>(value);
    __syncwarp();
    const T found = emu_bits<T>(emu_block.exchanged[emu_block.current / EMU_WARP * EMU_WARP + (from & 31)]);
    __syncwarp();
    return found;
}
template <class T> inline T __shfl_sync(uint32_t, T value, int from) { return emu_shuffle(value, from); }
template <class T> inline T __shfl_xor_sync(uint32_t, T value, int mask) { return emu_shuffle(value, emu_lane() ^ mask); }
template <class T> inline T __shfl_up_sync(uint32_t, T value, int by) { return emu_shuffle(value, emu_lane() >= by ? emu_lane() - by : emu_lane()); }
inline uint32_t __ballot_sync(uint32_t, bool vote) {
    uint32_t found = 0;
    emu_seen(vote, [&](int lane, uint32_t shown) { found |= shown << lane; });
    return found;
}
inline uint32_t __match_any_sync(uint32_t, int value) {
    uint32_t found = 0;
    const auto own = (uint32_t)value;
    emu_seen(own, [&](int lane, uint32_t shown) { found |= (uint32_t)(shown == own) << lane; });
    return found;
}
inline int __reduce_add_sync(uint32_t, int value) {
    for (int mask = EMU_WARP / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(0, value, mask);
    return value;
}
inline int __reduce_max_sync(uint32_t, int value) {
    for (int mask = EMU_WARP / 2; mask > 0; mask /= 2) value = std::max(value, __shfl_xor_sync(0, value, mask));
    return value;
}

// -- a launch -------------------------------------------------------------------------------------------------------------------------

// The end of a grid: what was written late is there. peers.h has something to do.
inline void (*emu_after_grid)() = nullptr;

// A barrier waits for the threads that are left: who returns may have been the last.
inline void emu_left(EmuBarrier& barrier, int live) {
    if (live > 0 && barrier.came > 0 && barrier.came >= live) {
        barrier.came = 0;
        ++barrier.turn;
    }
}
inline void emu_thread() {
    emu_block.kernel(emu_block.arguments);
    const int warp = emu_block.current / EMU_WARP;
    emu_block.done[emu_block.current] = 1;
    emu_left(emu_block.all, --emu_block.live);
    emu_left(emu_block.warps[warp], --emu_block.warp_live[warp]);
    emu_yield();
}
// Lets a thread run until it waits or returns.
inline void emu_resume(unsigned thread) {
    emu_block.current = thread;
    threadIdx = {thread, 0, 0};
    swapcontext(&emu_block.scheduler, &emu_block.contexts[thread]);
}
inline void emu_begin(unsigned threads) {
    const unsigned warps = (threads + EMU_WARP - 1) / EMU_WARP;
    memset(emu_block.blocked, 0, sizeof(emu_block.blocked));
    emu_block.done.assign(threads, 0);
    emu_block.live = threads;
    emu_block.warp_live.assign(warps, 0);
    emu_block.warps.assign(warps, {});
    emu_block.all = {};
    for (unsigned thread = 0; thread < threads; ++thread) {
        ++emu_block.warp_live[thread / EMU_WARP];
        ucontext_t& context = emu_block.contexts[thread];
        getcontext(&context);
        context.uc_stack.ss_sp = &emu_block.stacks[(size_t)thread * EMU_STACK];
        context.uc_stack.ss_size = EMU_STACK;
        context.uc_link = &emu_block.scheduler;
        makecontext(&context, emu_thread, 0);
    }
}
// Each thread in turn.
inline void emu_round_forwards(unsigned threads) {
    for (unsigned thread = 0; thread < threads; ++thread)
        if (!emu_block.done[thread]) emu_resume(thread);
}
// Warps backwards; each runs until all its threads have returned or wait at a barrier of the block: one warp far ahead.
inline void emu_round_backwards(unsigned threads) {
    for (int warp = (int)(threads + EMU_WARP - 1) / EMU_WARP - 1; warp >= 0; --warp) {
        const unsigned first = warp * EMU_WARP, behind = std::min(threads, first + EMU_WARP);
        for (bool again = true; again;) {
            again = false;
            for (unsigned thread = first; thread < behind; ++thread) {
                if (emu_block.done[thread]) continue;
                emu_resume(thread);
                if (!emu_block.done[thread] && !emu_block.blocked[thread]) again = true;
            }
        }
    }
}
// Order 0: blocks and threads forwards. 1: blocks backwards, and warps backwards with one far ahead. 2: blocks backwards.
inline void emu_launch(void (*kernel)(void*), void* arguments, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads,
                       size_t shared, int order) {
    constexpr long ROUNDS = 10'000'000;  // of all threads of a block
    constexpr size_t ALIGNED = 32;
    std::vector<char> dynamic(shared + 2 * ALIGNED);
    emu_dynamic = (char*)(((uintptr_t)dynamic.data() + ALIGNED - 1) & ~(uintptr_t)(ALIGNED - 1));
    emu_dynamic_bytes = shared;
    emu_block.threads = threads;
    emu_block.kernel = kernel;
    emu_block.arguments = arguments;
    emu_block.contexts.resize(threads);
    emu_block.stacks.resize((size_t)threads * EMU_STACK);
    gridDim = {grid_x, grid_y, grid_z};
    blockDim = {threads, 1, 1};
    const size_t blocks = (size_t)grid_x * grid_y * grid_z;
    for (size_t n = 0; n < blocks; ++n) {
        const size_t block = order ? blocks - 1 - n : n;
        memset(dynamic.data(), 0xff, dynamic.size());
        blockIdx = {(unsigned)(block % grid_x), (unsigned)(block / grid_x % grid_y), (unsigned)(block / grid_x / grid_y)};
        emu_begin(threads);
        for (long rounds = 0; emu_block.live > 0; ++rounds) {
            if (rounds >= ROUNDS) emu_refuse("deadlock: no thread of a block returns", "look for a barrier that not all of its threads come to");
            order == 1 ? emu_round_backwards(threads) : emu_round_forwards(threads);
        }
    }
    if (emu_after_grid) emu_after_grid();
}
