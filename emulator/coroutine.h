/* SPDX-License-Identifier: Apache-2.0 */
/* coroutine.h -- from one stack to another, without the C library: sanitizers intercept its ways
 * (setjmp, swapcontext), and it asks the kernel for the signal mask each time. Floating-point modes
 * are one thread's, and no kernel changes them. The lines for aarch64 have not run yet. */
#ifndef BALLAST_TESTS_EMULATE_COROUTINE_H
#define BALLAST_TESTS_EMULATE_COROUTINE_H

#include <stddef.h>

#if defined(__x86_64__) || defined(__aarch64__)

struct coroutine_state {
    void *stack_pointer;
};

/* Saves where it is in `from` and goes on where `to` was saved. */
extern "C" void emulated_switch(coroutine_state *from, const coroutine_state *to);

#if defined(__x86_64__)
enum {
    COROUTINE_SAVED = 8,
    COROUTINE_ENTRY = 6
}; /* words: rbp, rbx, r12..r15, the return address; one to align */

asm(R"(
    .text
    .p2align 4
    .globl emulated_switch
    .hidden emulated_switch
    .type emulated_switch, @function
emulated_switch:
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
    popq %rcx
    jmp *%rcx # the caller is another one: a return would be predicted to the wrong place
    .size emulated_switch, . - emulated_switch
)");
#else
enum { COROUTINE_SAVED = 20, COROUTINE_ENTRY = 11 }; /* x19..x28, x29, x30, d8..d15 */

asm(R"(
    .text
    .p2align 4
    .globl emulated_switch
    .hidden emulated_switch
    .type emulated_switch, %function
emulated_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    ldr x9, [x1]
    mov sp, x9
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size emulated_switch, . - emulated_switch
)");
#endif

/* `entry` never returns. `top` is aligned to 16. */
static inline void coroutine_begin(coroutine_state *c, char *stack, size_t bytes, void (*entry)())
{
    void **words = (void **)(stack + bytes) - COROUTINE_SAVED;
    for (int i = 0; i < COROUTINE_SAVED; i++) words[i] = nullptr;
    words[COROUTINE_ENTRY] = (void *)entry;
    c->stack_pointer = words;
}

#else /* slower, and not for sanitizers */
#include <ucontext.h>

struct coroutine_state {
    ucontext_t context;
};

static inline void emulated_switch(coroutine_state *from, const coroutine_state *to)
{
    swapcontext(&from->context, &to->context);
}

static inline void coroutine_begin(coroutine_state *c, char *stack, size_t bytes, void (*entry)())
{
    getcontext(&c->context);
    c->context.uc_stack.ss_sp = stack;
    c->context.uc_stack.ss_size = bytes;
    c->context.uc_link = nullptr;
    makecontext(&c->context, entry, 0);
}
#endif

#endif
