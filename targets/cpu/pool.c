/* Thread pool and replayer that are linked into every CPU artifact: portable C11 and pthreads, no other dependency.
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
static struct {
  _Alignas(64) atomic_uint_fast64_t word;
  _Alignas(64) atomic_int done;
  _Alignas(64) nf_lambda lambda;
  void *data;
  atomic_int error;
  _Alignas(64) atomic_int sleepers;
  atomic_int stop;
  pthread_mutex_t mutex;
  pthread_cond_t wake;
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static pthread_t threads[NF_MAX_THREADS];
static int workers = 0; /* beside the calling thread */
static pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER; /* one replay at a time, and no start or stop during it */

static inline uint32_t word_epoch(uint64_t word) { return (uint32_t)(word >> 32); }
static inline uint32_t word_tasks(uint64_t word) { return (uint32_t)(word >> 16) & 0xffff; }
static inline uint32_t word_next(uint64_t word) { return (uint32_t)word & 0xffff; }

static void run_tasks(void) {
  for (;;) {
    uint64_t word = atomic_load_explicit(&pool.word, memory_order_acquire);
    if (word_next(word) >= word_tasks(word)) return; /* look before adding, so that `next` cannot run over */
    word = atomic_fetch_add_explicit(&pool.word, 1, memory_order_acq_rel);
    if (word_next(word) >= word_tasks(word)) return;
    nf_group group = {0, (int32_t)word_tasks(word)};
    if (pool.lambda((int)word_next(word), &group, pool.data) != 0) atomic_store(&pool.error, 1);
    atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
  }
}

static uint32_t wait_for_launch(uint32_t seen) {
  for (int i = 0; i < NF_SPINS; i++) {
    uint32_t epoch = word_epoch(atomic_load_explicit(&pool.word, memory_order_acquire));
    if (epoch != seen || atomic_load_explicit(&pool.stop, memory_order_relaxed)) return epoch;
    nf_pause();
  }
  pthread_mutex_lock(&pool.mutex);
  atomic_fetch_add(&pool.sleepers, 1); /* sequentially consistent with the launcher's store of word and load of sleepers */
  while (word_epoch(atomic_load(&pool.word)) == seen && !atomic_load(&pool.stop)) pthread_cond_wait(&pool.wake, &pool.mutex);
  atomic_fetch_sub(&pool.sleepers, 1);
  pthread_mutex_unlock(&pool.mutex);
  return word_epoch(atomic_load(&pool.word));
}

static void *worker(void *epoch) {
  uint32_t seen = (uint32_t)(uintptr_t)epoch;
  while (!atomic_load_explicit(&pool.stop, memory_order_relaxed)) {
    seen = wait_for_launch(seen);
    run_tasks();
  }
  return NULL;
}

static void wake_all(void) {
  pthread_mutex_lock(&pool.mutex);
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.mutex);
}

static int parallel_launch(nf_lambda lambda, void *data, int num_task) {
  if (workers == 0) {
    nf_group group = {0, 1};
    return lambda(0, &group, data);
  }
  /* More tasks than threads, taken one by one: a thread that was interrupted holds up one task, not its share of the work. */
  if (num_task <= 0) num_task = (workers + 1) * NF_TASKS_PER_THREAD;
  pool.lambda = lambda;
  pool.data = data;
  atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
  atomic_store_explicit(&pool.error, 0, memory_order_relaxed);
  uint64_t epoch = (uint64_t)word_epoch(atomic_load_explicit(&pool.word, memory_order_relaxed)) + 1;
  atomic_store(&pool.word, epoch << 32 | (uint64_t)num_task << 16);
  if (atomic_load(&pool.sleepers) > 0) wake_all();
  run_tasks();
  for (int i = 0; atomic_load_explicit(&pool.done, memory_order_acquire) < num_task; i++) {
    if (i < NF_SPINS) nf_pause();
    else sched_yield(); /* a worker was interrupted in mid-task */
  }
  return atomic_load(&pool.error) ? -1 : 0;
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

static void stop_workers(void) {
  atomic_store(&pool.stop, 1);
  wake_all();
  for (int i = 0; i < workers; i++) pthread_join(threads[i], NULL);
  workers = 0;
  atomic_store(&pool.stop, 0);
}

/* Use `count` threads, the caller's included. Returns how many there are now (fewer if the system refuses more). */
NF_EXPORT int nf_pool_start(int count) {
  pthread_mutex_lock(&owner);
  if (count > NF_MAX_THREADS) count = NF_MAX_THREADS;
  stop_workers();
  uint32_t epoch = word_epoch(atomic_load(&pool.word));
  while (workers + 1 < count) {
    if (pthread_create(&threads[workers], NULL, worker, (void *)(uintptr_t)epoch) != 0) break;
    workers++;
  }
  int now = workers + 1;
  pthread_mutex_unlock(&owner);
  return now;
}

NF_EXPORT void nf_pool_stop(void) {
  pthread_mutex_lock(&owner);
  stop_workers();
  pthread_mutex_unlock(&owner);
}

/* TVMFFIAny and the calling convention of tvm-ffi functions. */
typedef struct {
  int32_t type_index;
  uint32_t zero;
  void *value;
} nf_any;

typedef struct {
  int (*function)(void *self, const nf_any *args, int32_t count, nf_any *result);
  const nf_any *args;
  int64_t count;
} nf_launch;

/* Run a plan. Returns -1, or the index of the launch that failed (its error is set in tvm-ffi's thread-local slot). */
NF_EXPORT int32_t nf_replay(const nf_launch *launches, int32_t n) {
  int32_t failed = -1;
  pthread_mutex_lock(&owner);
  for (int32_t i = 0; i < n && failed < 0; i++) {
    nf_any result = {0, 0, 0};
    if (launches[i].function(NULL, launches[i].args, (int32_t)launches[i].count, &result) != 0) failed = i;
  }
  pthread_mutex_unlock(&owner);
  return failed;
}
