// Several GPUs for the emulated device code: each is a process, and their memory is one mapping at one address. What a thread writes by
// ordinary stores becomes visible to others late and in any order, unless a release comes before (emu_flush); packets may be seen torn
// between their two words; whoever looks at a flag lets the other threads and processes run. Where looks alone are all that a process does,
// another one is late: it computes, and needs the processor that looks would take.
#include <ctime>
#include <sched.h>
#include <unistd.h>
#define __noinline__
struct EmuWrite { void* to; unsigned char what[16]; unsigned n; };
inline std::vector<EmuWrite> emu_pending;
inline bool emu_moved = false;  // whether anything was read or written since it was looked at last
inline uint64_t emu_state = 88172645463325252ull;
inline unsigned emu_random() { emu_state ^= emu_state << 13; emu_state ^= emu_state >> 7; emu_state ^= emu_state << 17; return emu_state >> 33; }
inline void emu_apply(size_t i) { memcpy(emu_pending[i].to, emu_pending[i].what, emu_pending[i].n); emu_pending[i] = emu_pending.back(); emu_pending.pop_back(); }
inline void emu_flush() { while (!emu_pending.empty()) emu_apply(emu_pending.size() - 1); __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void emu_write(void* to, const void* what, unsigned n) {
  emu_moved = true;
  for (auto& w : emu_pending) if (w.to == to) { memcpy(w.what, what, n); return; }
  EmuWrite w{to, {}, n}; memcpy(w.what, what, n); emu_pending.push_back(w);
  if (emu_pending.size() > 64) emu_apply(emu_random() % emu_pending.size());
}
inline void emu_read(void* into, const void* from, unsigned n) {
  emu_moved = true;
  if (emu_random() % 8192 == 0) usleep(300);  // a slow reader
  for (auto& w : emu_pending) if (w.to == from && w.n == n) { memcpy(into, w.what, n); return; }
  memcpy(into, from, n);
}
inline void emu_look() {
  static unsigned n = 0, idle = 0;
  if (++n % 1024 == 0) {
    if (!emu_pending.empty() && emu_random() % 8 == 0) emu_apply(emu_random() % emu_pending.size());
    idle = emu_moved ? 0 : idle + 1;
    emu_moved = false;
    if (idle < 4) sched_yield(); else usleep(idle < 64 ? 50 : 500);
  }
  emu_yield();
}
inline uint32_t atomicMax(uint32_t* p, uint32_t v) {
    uint32_t was = __atomic_load_n(p, __ATOMIC_SEQ_CST);
    while (was < v && !__atomic_compare_exchange_n(p, &was, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return was;
}
inline int emu_bad = 0;
inline int __syncthreads_and(int p) { __syncthreads(); if (!p) emu_bad = 1; __syncthreads(); int r = !emu_bad; __syncthreads(); emu_bad = 0; return r; }
inline const bool emu_writes_end = (emu_after_grid = emu_flush, true);  // a grid that has ended has written
