// Fibers of the emulated device code that change places without a system call: glibc's swapcontext(3) saves the signal mask at each change,
// which took a third of the time. The library of a kernel binds to these (-Bsymbolic) in place of glibc's. A context is its stack pointer,
// kept in the first word of ucontext_t; what the System V ABI (x86-64, section 3.2.1) has a callee keep lies on the stack. Stacks lie 64 KiB
// apart, so their tops would share a few sets of every cache and evict each other: each begins elsewhere within EMU_SPREAD bytes. Other
// processors keep glibc's.
#include <cstddef>
#if defined(__x86_64__) && defined(__linux__)
extern "C" int getcontext(ucontext_t*) noexcept { return 0; }
extern "C" void makecontext(ucontext_t* c, void (*begin)(), int, ...) noexcept {
  constexpr uintptr_t EMU_SPREAD = 16 << 10;
  const auto low = reinterpret_cast<uintptr_t>(c->uc_stack.ss_sp), high = low + c->uc_stack.ss_size;
  auto* top = reinterpret_cast<uintptr_t*>((high - low / c->uc_stack.ss_size * 576 % EMU_SPREAD) & ~uintptr_t(15));
  *--top = 0;  // begin() finds its stack as a call leaves it
  *--top = reinterpret_cast<uintptr_t>(begin);
  for (int i = 0; i < 6; ++i) *--top = 0;
  c->uc_flags = reinterpret_cast<unsigned long>(top);
}
static_assert(offsetof(ucontext_t, uc_flags) == 0, "swapcontext keeps the stack pointer in the first word");
asm(R"(
  .text
  .globl swapcontext
  .type swapcontext, @function
swapcontext:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  xorl %eax, %eax
  ret
  .size swapcontext, .-swapcontext
)");
#endif
