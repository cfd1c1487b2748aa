// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011), keyed as in alpha/ops/random.py: key (seed, purpose), counter (group low, group
// high, sample, step); word position % 4 of group position / 4 belongs to a position.
#pragma once
#include <cstdint>

namespace philox {

__device__ __forceinline__ uint4 words(uint4 counter, uint2 key) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
        const uint32_t high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key.x += 0x9E3779B9u;
        key.y += 0xBB67AE85u;
    }
    return counter;
}

}  // namespace philox
