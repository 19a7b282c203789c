/* Selects the header of the system. Each defines:
 *
 * nf_lock, nf_signal         mutual exclusion, and waiting under it
 * nf_thread                  a thread that runs `void work(void *)`; NF_HOST_THREADS if only the host can make one
 * nf_process, nf_process_id  tells a forked process from its parent
 * nf_memory_new/_free        memory at multiples of 64 bytes
 * nf_yield                   lets others run
 * nf_now                     nanoseconds, if NF_CLOCK says that there is a clock
 * nf_own, nf_set_own         a thread-local pointer, for pool.c only
 * NF_EXPORT                  marks functions that users of the library call
 * NF_SHARED                  marks variables that TVM's objects define too: the linker takes any of them
 */
#ifndef NF_PLATFORM_H
#define NF_PLATFORM_H

#if defined(__wasm__)
#include "on_wasm.h"
#elif defined(_WIN32)
#include "on_windows.h"
#else
#include "on_posix.h"
#endif

#endif
