/* WebAssembly without an operating system. Threads are the host's workers: each makes an instance of the module
 * over the same memory and calls nf_pool_work, which returns when the pool is stopped. Without shared memory
 * (a build without +atomics) there is one thread, and nothing waits.
 */
#include <stddef.h>
#include <stdint.h>

#define NF_EXPORT __attribute__((visibility("default")))
#define NF_SHARED __attribute__((weak))
#define NF_HOST_THREADS 1

typedef _Atomic int32_t nf_lock;
typedef _Atomic int32_t nf_signal; /* counts its wake-ups */
typedef int nf_process;
typedef char nf_thread;

/* A spin lock: it is held for a few instructions only, also by a page's main thread, which may not wait. */
static inline void nf_lock_init(nf_lock *lock) { *lock = 0; }
static inline void nf_lock_destroy(nf_lock *lock) { (void)lock; }
static inline void nf_lock_take(nf_lock *lock) {
  while (__c11_atomic_exchange(lock, 1, __ATOMIC_ACQUIRE) != 0) {
  }
}
static inline void nf_lock_give(nf_lock *lock) { __c11_atomic_store(lock, 0, __ATOMIC_RELEASE); }

static inline void nf_signal_init(nf_signal *signal) { *signal = 0; }
static inline void nf_signal_destroy(nf_signal *signal) { (void)signal; }
static inline void nf_signal_wait(nf_signal *signal, nf_lock *lock) {
  int32_t seen = *signal;
  nf_lock_give(lock);
#if defined(__wasm_atomics__)
  __builtin_wasm_memory_atomic_wait32((int32_t *)signal, seen, -1);
#else
  (void)seen;
#endif
  nf_lock_take(lock);
}
static inline void nf_signal_all(nf_signal *signal) {
  __c11_atomic_fetch_add(signal, 1, __ATOMIC_SEQ_CST);
#if defined(__wasm_atomics__)
  __builtin_wasm_memory_atomic_notify((int32_t *)signal, UINT32_MAX);
#endif
}

static inline nf_process nf_process_id(void) { return 0; }

/* wasm.c: memory from the module's own part. The rest of the memory belongs to the host. */
void *nf_memory_new(size_t bytes);
void nf_memory_free(void *memory);

/* Called by the thread that replays, which is not a page's main thread, while it waits for workers. */
static inline void nf_yield(void) {
#if defined(__wasm_atomics__)
  static int32_t never = 0;
  __builtin_wasm_memory_atomic_wait32(&never, 0, 20000);
#endif
}

/* A memory has one engine, and only the engine's caller reads this. */
static void *nf_own_value;
static inline void *nf_own(void) { return nf_own_value; }
static inline void nf_set_own(void *value) { nf_own_value = value; }
