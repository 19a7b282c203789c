/* Replays plans: runs their launches one after the other on the threads of a pool. */
#include "runtime.h"

/* Announce the weights of the next launch that has some, so that waiting threads read them ahead. */
static int32_t announce(nf_pool *pool, const nf_launch *launches, int32_t n, int32_t from) {
  int32_t next = from;
  while (next < n && launches[next].bytes == 0) next++;
  const nf_launch *found = next < n ? &launches[next] : NULL;
  atomic_store_explicit(&pool->ahead_bytes, found ? (size_t)found->bytes : 0, memory_order_relaxed);
  atomic_store_explicit(&pool->ahead, found ? (uintptr_t)found->weights : 0, memory_order_relaxed);
  return next;
}

#if !defined(NF_CLOCK)
#define nf_now() 0
#endif

/* The body of both replays below; nf_replay passes a constant NULL as `times`, so that it has no code for clocks. */
static inline __attribute__((always_inline)) int32_t run_plan(nf_pool *pool, const nf_launch *launches,
                                                              int32_t n, int64_t *times) {
  int32_t failed = -1, announced = 0;
  nf_enter(pool);
  for (int32_t i = 0; i < n && failed < 0; i++) {
    nf_any result = {0};
    if (times != NULL) times[i] = nf_now();
    if (announced <= i) announced = announce(pool, launches, n, i + 1);
    if (launches[i].function(NULL, launches[i].args, (int32_t)launches[i].count, &result) != 0) failed = i;
  }
  if (times != NULL) times[n] = nf_now();
  announce(pool, launches, 0, 0);
  nf_leave(pool);
  return failed;
}

/* Bytes of an nf_launch, for hosts that write them: a library without this constant is older than its last fields. */
NF_EXPORT const int32_t nf_launch_bytes = sizeof(nf_launch);

/* Run a plan on the threads of a pool. Returns -1, or the index of the launch that failed (its error is set in
 * tvm-ffi's thread-local slot). */
NF_EXPORT int32_t nf_replay(nf_pool *pool, const nf_launch *launches, int32_t n) {
  return run_plan(pool, launches, n, NULL);
}

#if defined(NF_CLOCK)
/* Run a plan, and store the time before each launch and after the last one: `times` has room for n + 1. */
NF_EXPORT int32_t nf_profile(nf_pool *pool, const nf_launch *launches, int32_t n, int64_t *times) {
  return run_plan(pool, launches, n, times);
}
#endif
