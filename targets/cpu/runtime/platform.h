/* The system, one header each:
 *
 * nf_lock, nf_signal         mutual exclusion, and waiting under it
 * nf_thread                  a thread that runs `void work(void *)`; NF_HOST_THREADS where only the host can make one
 * nf_process, nf_process_id  tells a forked process from its parent
 * nf_memory_new/_free        memory at multiples of 64 bytes
 * nf_yield                   lets others run
 * nf_now                     nanoseconds, where NF_CLOCK says that there is a clock
 * nf_own, nf_set_own         a pointer that every thread has its own of; for pool.c alone
 * NF_EXPORT                  of what the library's user calls
 * NF_SHARED                  of a variable that objects of TVM's define too: any one of them is taken
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
