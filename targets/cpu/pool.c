/* Thread pool and replayer that are linked into every CPU artifact: portable C11 and pthreads, no other dependency.
 *
 * A pool belongs to one engine: several engines over one artifact share the library, but not their threads.
 *
 * A step of a model is some two hundred launches of a few microseconds each, so a launch must not cost one itself: workers that
 * have just worked spin for the next launch, and only sleep when none comes. The caller works too, and waits for tasks, not for
 * workers: one that the system has not scheduled yet delays nothing.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#if defined(_WIN32)
#define NF_EXPORT __declspec(dllexport)
#else
#define NF_EXPORT __attribute__((visibility("default")))
#endif

#if defined(__x86_64__) || defined(__i386__)
#define nf_pause() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define nf_pause() __asm__ __volatile__("isb" ::: "memory")
#else
#define nf_pause() ((void)0)
#endif

/* Pauses before a worker sleeps: 60 to 200 microseconds by CPU, longer than the host needs between two steps. */
enum { NF_SPINS = 4000, NF_MAX_THREADS = 256, NF_TASKS_PER_THREAD = 8 };

typedef struct {
  void *sync_handle;
  int32_t num_task;
} nf_group;
typedef int (*nf_lambda)(int task, nf_group *group, void *data);

/* What the workers see of a launch. `word` is epoch:32 | tasks:16 | next:16. Adding one to it claims task `next` if that is below
 * `tasks`; a launch ends when all its tasks are done, so lambda and data of a claimed task cannot change under the claimer. */
typedef struct {
  _Alignas(64) atomic_uint_fast64_t word;
  _Alignas(64) atomic_int done;
  _Alignas(64) nf_lambda lambda;
  void *data;
  atomic_int error;
  _Alignas(64) atomic_int sleepers;
  atomic_int stop;
  pthread_mutex_t mutex;
  pthread_cond_t wake;
  pthread_mutex_t owner; /* one replay at a time, and no end during it */
  pid_t process;         /* the one that the workers live in */
  int workers;           /* beside the calling thread */
  pthread_t threads[NF_MAX_THREADS];
} nf_pool;

/* The pool of the replay that this thread is in: TVM's hook for parallel loops is a global function without a place for it. */
static _Thread_local nf_pool *current = NULL;

static inline uint32_t word_epoch(uint64_t word) { return (uint32_t)(word >> 32); }
static inline uint32_t word_tasks(uint64_t word) { return (uint32_t)(word >> 16) & 0xffff; }
static inline uint32_t word_next(uint64_t word) { return (uint32_t)word & 0xffff; }

static void run_tasks(nf_pool *pool) {
  for (;;) {
    uint64_t word = atomic_load_explicit(&pool->word, memory_order_acquire);
    if (word_next(word) >= word_tasks(word)) return; /* look before adding, so that `next` cannot run over */
    word = atomic_fetch_add_explicit(&pool->word, 1, memory_order_acq_rel);
    if (word_next(word) >= word_tasks(word)) return;
    nf_group group = {0, (int32_t)word_tasks(word)};
    if (pool->lambda((int)word_next(word), &group, pool->data) != 0) atomic_store(&pool->error, 1);
    atomic_fetch_add_explicit(&pool->done, 1, memory_order_release);
  }
}

static uint32_t wait_for_launch(nf_pool *pool, uint32_t seen) {
  for (int i = 0; i < NF_SPINS; i++) {
    uint32_t epoch = word_epoch(atomic_load_explicit(&pool->word, memory_order_acquire));
    if (epoch != seen || atomic_load_explicit(&pool->stop, memory_order_relaxed)) return epoch;
    nf_pause();
  }
  pthread_mutex_lock(&pool->mutex);
  atomic_fetch_add(&pool->sleepers, 1); /* sequentially consistent with the launcher's store of word and load of sleepers */
  while (word_epoch(atomic_load(&pool->word)) == seen && !atomic_load(&pool->stop)) pthread_cond_wait(&pool->wake, &pool->mutex);
  atomic_fetch_sub(&pool->sleepers, 1);
  pthread_mutex_unlock(&pool->mutex);
  return word_epoch(atomic_load(&pool->word));
}

static void *worker(void *argument) {
  nf_pool *pool = argument;
  uint32_t seen = 0;
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "nearfar-cpu"); /* for top and profilers */
#endif
  while (!atomic_load_explicit(&pool->stop, memory_order_relaxed)) {
    seen = wait_for_launch(pool, seen);
    run_tasks(pool);
  }
  return NULL;
}

static void wake_all(nf_pool *pool) {
  pthread_mutex_lock(&pool->mutex);
  pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->mutex);
}

static int parallel_launch(nf_lambda lambda, void *data, int num_task) {
  nf_pool *pool = current;
  if (pool == NULL || pool->workers == 0) {
    nf_group group = {0, 1};
    return lambda(0, &group, data);
  }
  /* More tasks than threads, taken one by one: a thread that was interrupted holds up one task, not its share of the work. */
  if (num_task <= 0) num_task = (pool->workers + 1) * NF_TASKS_PER_THREAD;
  pool->lambda = lambda;
  pool->data = data;
  atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
  atomic_store_explicit(&pool->error, 0, memory_order_relaxed);
  uint64_t epoch = (uint64_t)word_epoch(atomic_load_explicit(&pool->word, memory_order_relaxed)) + 1;
  atomic_store(&pool->word, epoch << 32 | (uint64_t)num_task << 16);
  if (atomic_load(&pool->sleepers) > 0) wake_all(pool);
  run_tasks(pool);
  for (int i = 0; atomic_load_explicit(&pool->done, memory_order_acquire) < num_task; i++) {
    if (i < NF_SPINS) nf_pause();
    else sched_yield(); /* a worker was interrupted in mid-task */
  }
  return atomic_load(&pool->error) ? -1 : 0;
}

/* Code that LLVM compiled from T.parallel calls through this pointer; the definition here replaces the module's weak null. */
NF_EXPORT int (*__TVMBackendParallelLaunch)(nf_lambda, void *, int) = parallel_launch;

/* The same for local buffers beyond 1 KiB, which TVM does not keep on the stack. */
static void *alloc_workspace(int device, int id, uint64_t bytes, int code, int bits) {
  (void)device, (void)id, (void)code, (void)bits;
  return aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64));
}
static int free_workspace(int device, int id, void *memory) {
  (void)device, (void)id;
  free(memory);
  return 0;
}
NF_EXPORT void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = alloc_workspace;
NF_EXPORT int (*__TVMBackendFreeWorkspace)(int, int, void *) = free_workspace;

static void prepare(nf_pool *pool) {
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->wake, NULL);
  pthread_mutex_init(&pool->owner, NULL);
  pool->process = getpid();
  pool->workers = 0;
}

/* fork() copies the memory of a pool but not its threads, and its locks as they happened to be. */
static void leave_parent(nf_pool *pool) {
  if (pool->process != getpid()) prepare(pool);
}

/* A pool of `count` threads, the caller's included (fewer if the system refuses more); NULL where there is no memory for it. */
NF_EXPORT nf_pool *nf_pool_new(int count) {
  nf_pool *pool = aligned_alloc(_Alignof(nf_pool), sizeof(nf_pool));
  if (pool == NULL) return NULL;
  memset(pool, 0, sizeof(nf_pool));
  prepare(pool);
  while (pool->workers + 1 < count && pool->workers < NF_MAX_THREADS) {
    if (pthread_create(&pool->threads[pool->workers], NULL, worker, pool) != 0) break;
    pool->workers++;
  }
  return pool;
}

/* How many threads it has in this process, the caller's included. */
NF_EXPORT int nf_pool_threads(nf_pool *pool) {
  leave_parent(pool);
  return pool->workers + 1;
}

/* End the threads, after a replay that is under way, and free the pool. */
NF_EXPORT void nf_pool_free(nf_pool *pool) {
  leave_parent(pool);
  pthread_mutex_lock(&pool->owner);
  atomic_store(&pool->stop, 1);
  wake_all(pool);
  for (int i = 0; i < pool->workers; i++) pthread_join(pool->threads[i], NULL);
  pthread_mutex_unlock(&pool->owner);
  pthread_mutex_destroy(&pool->owner);
  pthread_cond_destroy(&pool->wake);
  pthread_mutex_destroy(&pool->mutex);
  free(pool);
}

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

typedef struct {
  int (*function)(void *self, const nf_any *args, int32_t count, nf_any *result);
  const nf_any *args;
  int64_t count;
} nf_launch;

/* The clock of nf_profile, in nanoseconds. */
static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Both replays below: `times` is a constant NULL in one of them, so that its code knows nothing of clocks. */
static inline __attribute__((always_inline)) int32_t run_plan(nf_pool *pool, const nf_launch *launches,
                                                              int32_t n, int64_t *times) {
  int32_t failed = -1;
  leave_parent(pool);
  pthread_mutex_lock(&pool->owner);
  current = pool;
  for (int32_t i = 0; i < n && failed < 0; i++) {
    nf_any result = {0};
    if (times != NULL) times[i] = now();
    if (launches[i].function(NULL, launches[i].args, (int32_t)launches[i].count, &result) != 0) failed = i;
  }
  if (times != NULL) times[n] = now();
  current = NULL;
  pthread_mutex_unlock(&pool->owner);
  return failed;
}

/* Run a plan on the threads of a pool. Returns -1, or the index of the launch that failed (its error is set in
 * tvm-ffi's thread-local slot). */
NF_EXPORT int32_t nf_replay(nf_pool *pool, const nf_launch *launches, int32_t n) {
  return run_plan(pool, launches, n, NULL);
}

/* The same, with the time before each launch and after the last one: `times` has room for n + 1. */
NF_EXPORT int32_t nf_profile(nf_pool *pool, const nf_launch *launches, int32_t n, int64_t *times) {
  return run_plan(pool, launches, n, times);
}
