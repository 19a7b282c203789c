/* The runtime in a CPU artifact's library, in addition to the kernels: a pool of threads and the replay of plans.
 * It is C11, and depends on nothing but a header for each system (platform.h) and one for processors (subnormals.h).
 */
#ifndef NF_RUNTIME_H
#define NF_RUNTIME_H

#include "platform.h"
#include "subnormals.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
  void *sync_handle;
  int32_t num_task;
} nf_group;

/* The body of a parallel loop, as TVM compiles it: task `task` of group->num_task does its part of the extent. */
typedef int (*nf_lambda)(int task, nf_group *group, void *data);

enum { NF_MAX_THREADS = 256 };

/* The tasks of one thread that are not taken yet: epoch:32 | end:16 | next:16. The owner takes them from the
 * front, other threads from the end. */
typedef struct {
  _Alignas(64) _Atomic uint64_t word;
} nf_share;

typedef struct {
  /* The launch, as workers see it. It ends when all its tasks are done, so lambda, data and tasks cannot change
   * while a thread runs a task. */
  _Alignas(64) atomic_uint epoch;
  _Alignas(64) atomic_int done;
  _Alignas(64) nf_lambda lambda;
  void *data;
  int tasks;
  atomic_int error;
  /* Weights of a later launch, which waiting threads load into their caches: a hint, which may be torn or stale. */
  _Alignas(64) atomic_uintptr_t ahead;
  atomic_size_t ahead_bytes;
  _Alignas(64) atomic_int sleepers;
  atomic_int stop;
  atomic_int inside; /* workers that have come and not gone, if the host makes the threads */
  nf_lock lock;      /* guards `wake` */
  nf_signal wake;
  nf_lock owner;      /* held by a replay, so that there is one at a time, and the pool cannot end during it */
  nf_process process; /* the process that the workers belong to */
  unsigned caller;    /* how the replay's thread treats subnormal numbers outside of it */
  int extent;         /* turns of the next parallel loop; 0 if unknown */
  int patience;       /* nanoseconds that a worker polls before it sleeps */
  int workers;        /* threads, without the calling one */
  nf_thread threads[NF_MAX_THREADS];
  nf_share shares[NF_MAX_THREADS + 1]; /* the caller's first */
} nf_pool;

/* TVMFFIAny and the calling convention of tvm-ffi functions. */
typedef struct {
  int32_t type_index;
  uint32_t zero;
  union {
    void *pointer;
    uint64_t bits; /* 64 bits even if a pointer has 32 */
  } value;
} nf_any;
_Static_assert(sizeof(nf_any) == 16, "kernels take arguments of 16 bytes");

/* A kernel with its arguments; `weights`: the largest matrix among them; `bytes` is 0 if there is none. */
typedef struct {
  int (*function)(void *self, const nf_any *args, int32_t count, nf_any *result);
  const nf_any *args;
  int64_t count;
  const void *weights;
  int64_t bytes;
} nf_launch;
_Static_assert(sizeof(nf_launch) == (sizeof(void *) == 8 ? 40 : 32), "hosts write launches byte by byte");

/* pool.c: replays begin and end on a pool, one at a time. */
void nf_enter(nf_pool *pool);
void nf_leave(nf_pool *pool);

/* Runs a parallel loop on the threads of the pool that this thread is in. */
int nf_parallel_launch(nf_lambda lambda, void *data, int num_task);

/* hooks.c: sets TVM's hooks for parallel loops and memory. */
void nf_set_hooks(void);

#endif
