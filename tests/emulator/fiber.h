// SPDX-License-Identifier: BSD-3-Clause
// Fibers: stacks of their own that run until they switch away. Hand-written switch on x86-64, ucontext elsewhere.
// AddressSanitizer is told of every switch.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define FIBER_ASAN 1
#else
#define FIBER_ASAN 0
#endif
#if defined(__x86_64__) && !defined(FIBER_UCONTEXT)
#define FIBER_ASM
#else
#include <ucontext.h>
#endif

namespace emulator {

class Fiber {
public:
    static constexpr size_t STACK_BYTES = FIBER_ASAN ? 512 * 1024 : 128 * 1024;

    Fiber() = default;
    Fiber(const Fiber&) = delete;

    // Makes the next switch_to() start `entry` on this fiber's stack, whatever it was doing before.
    void prepare(void (*entry)()) {
        if (!stack_) allocate();
#if FIBER_ASAN
        __asan_unpoison_memory_region(stack_, STACK_BYTES);
        fake_stack_ = nullptr;
#endif
#if defined(FIBER_ASM)
        // From the top: padding, a return address that is never used, entry, six saved registers.
        // At entry the stack pointer is 8 beyond a multiple of 16, as after a call.
        auto* top = (uintptr_t*)(stack_ + STACK_BYTES) - 3;
        top[0] = 0;
        top[-1] = (uintptr_t)entry;
        for (int i = 2; i <= 7; i++) top[-i] = 0;
        stack_pointer_ = top - 7;
#else
        getcontext(&context_);
        context_.uc_stack.ss_sp = stack_;
        context_.uc_stack.ss_size = STACK_BYTES;
        context_.uc_link = nullptr;
        makecontext(&context_, entry, 0);
#endif
    }

    // Suspends the running fiber `from` and runs `to`. With `last`, `from` will not be resumed.
    static inline void switch_to(Fiber& from, Fiber& to, bool last = false);

    // To be called first thing on a stack that was switched to for the first time from `from`.
    void arrived(Fiber& from) {
#if FIBER_ASAN
        const void* bottom;
        size_t size;
        __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &size);
        from.bottom_ = bottom, from.size_ = size;
#else
        (void)from;
#endif
    }

private:
    void allocate() {
        const size_t page = (size_t)sysconf(_SC_PAGESIZE);
        void* memory = mmap(nullptr, STACK_BYTES + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        mprotect(memory, page, PROT_NONE);  // running off the stack faults instead of overwriting another fiber's
        stack_ = (char*)memory + page;
#if FIBER_ASAN
        bottom_ = stack_, size_ = STACK_BYTES;
#endif
    }

    char* stack_ = nullptr;
#if defined(FIBER_ASM)
    void* stack_pointer_ = nullptr;
#else
    ucontext_t context_;
#endif
#if FIBER_ASAN
    void* fake_stack_ = nullptr;
    const void* bottom_ = nullptr;
    size_t size_ = 0;
#endif
};

#if defined(FIBER_ASM)
extern "C" void emulator_switch_stack(void** save, void* load);
asm(R"(
.text
.type emulator_switch_stack, @function
emulator_switch_stack:
    endbr64
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch_stack, . - emulator_switch_stack
)");
#endif

inline void Fiber::switch_to(Fiber& from, Fiber& to, bool last) {
#if FIBER_ASAN
    __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack_, to.bottom_, to.size_);
#else
    (void)last;
#endif
#if defined(FIBER_ASM)
    emulator_switch_stack(&from.stack_pointer_, to.stack_pointer_);
#else
    swapcontext(&from.context_, &to.context_);
#endif
#if FIBER_ASAN
    __sanitizer_finish_switch_fiber(from.fake_stack_, nullptr, nullptr);
#endif
}

}  // namespace emulator
