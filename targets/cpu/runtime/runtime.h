/* What a CPU artifact's library has beside its kernels: a pool of threads and the replayer of plans. C11, no
 * dependency but one header of the system (platform.h).
 */
#ifndef NF_RUNTIME_H
#define NF_RUNTIME_H

#include "platform.h"

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

/* The tasks of one thread that nobody has taken: epoch:32 | end:16 | next:16. Its owner takes from the front,
 * others from the end. */
typedef struct {
  _Alignas(64) _Atomic uint64_t word;
} nf_share;

typedef struct {
  /* What the workers see of a launch. It ends when all its tasks are done, so lambda, data and tasks cannot
   * change under a thread that has taken a task. */
  _Alignas(64) atomic_uint epoch;
  _Alignas(64) atomic_int done;
  _Alignas(64) nf_lambda lambda;
  void *data;
  int tasks;
  atomic_int error;
  /* Weights of a launch to come, which waiting threads bring into their caches: a hint, torn or stale at worst. */
  _Alignas(64) atomic_uintptr_t ahead;
  atomic_size_t ahead_bytes;
  _Alignas(64) atomic_int sleepers;
  atomic_int stop;
  atomic_int inside; /* workers that have come and not gone, where the host makes the threads */
  nf_lock lock;      /* of `wake` */
  nf_signal wake;
  nf_lock owner;      /* one replay at a time, and no end during it */
  nf_process process; /* the one that the workers live in */
  int extent;         /* of the parallel loop that comes next; 0 where it is not known */
  int patience;       /* nanoseconds that a worker polls before it sleeps */
  int workers;        /* beside the calling thread */
  nf_thread threads[NF_MAX_THREADS];
  nf_share shares[NF_MAX_THREADS + 1]; /* the caller's first */
} nf_pool;

/* TVMFFIAny and the calling convention of tvm-ffi functions. */
typedef struct {
  int32_t type_index;
  uint32_t zero;
  union {
    void *pointer;
    uint64_t bits; /* 64 bits also where a pointer has 32 */
  } value;
} nf_any;
_Static_assert(sizeof(nf_any) == 16, "kernels take arguments of 16 bytes");

/* A kernel with its arguments; `weights`: the largest matrix among them, `bytes` 0 where there is none. */
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

/* hooks.c: lets TVM's code find the above, and memory. */
void nf_set_hooks(void);

#endif
