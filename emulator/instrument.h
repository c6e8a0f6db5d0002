/* SPDX-License-Identifier: Apache-2.0 */
/* instrument.h -- kernels that are compiled with -fsanitize=thread call the emulator's hooks
 * (hooks.cpp) by these names in the assembler, whether or not the program is linked with
 * ThreadSanitizer. */
#ifndef BALLAST_TESTS_EMULATE_INSTRUMENT_H
#define BALLAST_TESTS_EMULATE_INSTRUMENT_H

#define EMULATED_HOOK(theirs, ours) asm("__tsan_" theirs " = emulated_" ours);

EMULATED_HOOK("init", "instrumented_init")
EMULATED_HOOK("func_entry", "func_entry")
EMULATED_HOOK("func_exit", "func_exit")
EMULATED_HOOK("read1", "read1")
EMULATED_HOOK("read2", "read2")
EMULATED_HOOK("read4", "read4")
EMULATED_HOOK("read8", "read8")
EMULATED_HOOK("read16", "read16")
EMULATED_HOOK("write1", "write1")
EMULATED_HOOK("write2", "write2")
EMULATED_HOOK("write4", "write4")
EMULATED_HOOK("write8", "write8")
EMULATED_HOOK("write16", "write16")
EMULATED_HOOK("read_range", "read_range")
EMULATED_HOOK("write_range", "write_range")

#endif
