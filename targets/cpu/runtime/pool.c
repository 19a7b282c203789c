/* A pool of threads that belongs to one engine: several engines over one artifact share the library, but not
 * their threads.
 *
 * A step of a model is some two hundred launches of a few microseconds each, so a launch must not cost one
 * itself: workers that have just worked poll for the next launch, and only sleep when none comes. The caller
 * works too, and waits for tasks, not for workers: a worker that the system has not scheduled yet delays nothing.
 *
 * Each thread begins with a share of neighbouring tasks, so that it reads weights as one stream. A thread that
 * has finished its share takes tasks from the end of others' shares, while their owners go on from the front.
 */
#include "runtime.h"

enum {
  NF_TASKS_PER_THREAD = 16,
  NF_MAX_TASKS = 1 << 15,
  NF_PATIENCE = 150000,       /* nanoseconds before a worker sleeps: longer than the host needs between two steps */
  NF_PATIENCE_CROWDED = 5000, /* if threads outnumber cores, so that another one waits for this core */
  NF_POLL = 5,                /* approximate nanoseconds of a poll, if there is no clock */
  NF_POLLS_A_PAUSE = 64,   /* a hypervisor takes pauses close together for a spin lock, and stops the processor */
  NF_AHEAD_BYTES = 96 << 10, /* next weights read by each thread: they and its current data fit a second-level cache */
  NF_LINE = 64
};

#if defined(__x86_64__) || defined(__i386__)
#define nf_pause() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define nf_pause() __asm__ __volatile__("isb" ::: "memory")
#else
#define nf_pause() ((void)0)
#endif

/* The pool of a thread's replay is a thread-local pointer, because TVM's hook for parallel loops has no parameter
 * for it. */

static inline uint64_t pack(uint32_t epoch, uint32_t end, uint32_t next) {
  return (uint64_t)epoch << 32 | (uint64_t)end << 16 | next;
}
static inline uint32_t end_of(uint64_t word) { return (uint32_t)(word >> 16) & 0xffff; }
static inline uint32_t next_of(uint64_t word) { return (uint32_t)word & 0xffff; }
static inline int is_left(uint64_t word) { return next_of(word) < end_of(word); }

/* The next task of a thread's own share; -1 if none is left. */
static int take_first(nf_share *share) {
  /* Look before adding, so that `next` runs over by one at most: only the owner adds. */
  if (!is_left(atomic_load_explicit(&share->word, memory_order_acquire))) return -1;
  uint64_t word = atomic_fetch_add_explicit(&share->word, 1, memory_order_acq_rel);
  return is_left(word) ? (int)next_of(word) : -1;
}

/* The last task of another thread's share; -1 if none is left. */
static int take_last(nf_share *share) {
  uint64_t word = atomic_load_explicit(&share->word, memory_order_acquire);
  while (is_left(word)) {
    if (atomic_compare_exchange_weak_explicit(&share->word, &word, word - (1 << 16), memory_order_acq_rel,
                                              memory_order_acquire))
      return (int)end_of(word) - 1;
  }
  return -1;
}

static void run_share(nf_pool *pool, nf_share *share, int (*take)(nf_share *)) {
  int ran = 0;
  for (int task; (task = take(share)) >= 0; ran++) {
    nf_group group = {NULL, pool->tasks};
    if (pool->lambda(task, &group, pool->data) != 0) atomic_store(&pool->error, 1);
  }
  if (ran > 0) atomic_fetch_add_explicit(&pool->done, ran, memory_order_release);
}

/* Run all tasks that are left: thread `self`'s own (0: the caller), then those of the threads after it. */
static void run_tasks(nf_pool *pool, int self) {
  int threads = pool->workers + 1;
  run_share(pool, &pool->shares[self], take_first);
  for (int i = 1; i < threads; i++) run_share(pool, &pool->shares[(self + i) % threads], take_last);
}

/* The reading ahead of a waiting thread: each poll brings a line of weights into its cache. */
typedef struct {
  uintptr_t weights;
  uintptr_t at, end;
} nf_reading;

static inline void read_ahead(nf_pool *pool, nf_reading *reading, int self) {
  uintptr_t weights = atomic_load_explicit(&pool->ahead, memory_order_relaxed);
  if (weights != reading->weights) {
    size_t share = atomic_load_explicit(&pool->ahead_bytes, memory_order_relaxed) / (size_t)(pool->workers + 1);
    reading->weights = weights;
    reading->at = weights + share * (size_t)self;
    reading->end = reading->at + (share < NF_AHEAD_BYTES ? share : NF_AHEAD_BYTES);
  }
  if (reading->at < reading->end) {
    __builtin_prefetch((const void *)reading->at, 0, 2);
    reading->at += NF_LINE;
  }
}

/* Wait between two looks at the pool; 0 when the thread should sleep. */
static inline int poll(nf_pool *pool, nf_reading *reading, int self, int64_t *polled, int64_t *since) {
  read_ahead(pool, reading, self);
  if (++*polled % NF_POLLS_A_PAUSE != 0) return 1;
  nf_pause();
#if defined(NF_CLOCK)
  int64_t now = nf_now();
  if (*since == 0) *since = now;
  return now - *since < pool->patience;
#else
  (void)since;
  return *polled * NF_POLL < pool->patience;
#endif
}

static uint32_t wait_for_launch(nf_pool *pool, uint32_t seen, int self, nf_reading *reading) {
  int64_t polled = 0, since = 0;
  do {
    uint32_t epoch = atomic_load_explicit(&pool->epoch, memory_order_acquire);
    if (epoch != seen || atomic_load_explicit(&pool->stop, memory_order_relaxed)) return epoch;
  } while (poll(pool, reading, self, &polled, &since));
  nf_lock_take(&pool->lock);
  atomic_fetch_add(&pool->sleepers, 1); /* sequentially consistent with the launcher's epoch and look at sleepers */
  while (atomic_load(&pool->epoch) == seen && !atomic_load(&pool->stop)) nf_signal_wait(&pool->wake, &pool->lock);
  atomic_fetch_sub(&pool->sleepers, 1);
  nf_lock_give(&pool->lock);
  return atomic_load(&pool->epoch);
}

static void work(nf_pool *pool, int self) {
  uint32_t seen = 0;
  nf_reading reading = {0, 0, 0};
  nf_subnormals_as_zero(); /* the thread is the pool's, and on hosts that make threads this does nothing */
  while (!atomic_load_explicit(&pool->stop, memory_order_relaxed)) {
    seen = wait_for_launch(pool, seen, self, &reading);
    run_tasks(pool, self);
  }
}

static void wake_all(nf_pool *pool) {
  nf_lock_take(&pool->lock);
  nf_signal_all(&pool->wake);
  nf_lock_give(&pool->lock);
}

/* The number of tasks for an extent, none of them empty: task i of n takes ceil(extent / n) of it. */
static int tasks_of(int extent, int threads) {
  int most = threads * NF_TASKS_PER_THREAD;
  if (extent <= 0) return most;
  int step = extent / most > 0 ? extent / most : 1;
  int tasks = (extent + step - 1) / step;
  return tasks < NF_MAX_TASKS ? tasks : NF_MAX_TASKS;
}

static void launch(nf_pool *pool, nf_lambda lambda, void *data, int tasks) {
  int threads = pool->workers + 1;
  uint32_t epoch = atomic_load_explicit(&pool->epoch, memory_order_relaxed) + 1;
  pool->lambda = lambda;
  pool->data = data;
  pool->tasks = tasks;
  atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
  atomic_store_explicit(&pool->error, 0, memory_order_relaxed);
  for (int i = 0; i < threads; i++) {
    uint32_t first = (uint32_t)((int64_t)tasks * i / threads), end = (uint32_t)((int64_t)tasks * (i + 1) / threads);
    atomic_store_explicit(&pool->shares[i].word, pack(epoch, end, first), memory_order_release);
  }
  atomic_store(&pool->epoch, epoch);
  if (atomic_load(&pool->sleepers) > 0) wake_all(pool);
}

int nf_parallel_launch(nf_lambda lambda, void *data, int tasks) {
  nf_pool *pool = nf_own();
  if (pool == NULL || pool->workers == 0 || pool->extent == 1) { /* one turn: no worker needs to wake for it */
    if (pool != NULL) pool->extent = 0;
    nf_group group = {NULL, 1};
    return lambda(0, &group, data);
  }
  if (tasks <= 0) tasks = tasks_of(pool->extent, pool->workers + 1);
  pool->extent = 0;
  launch(pool, lambda, data, tasks);
  run_tasks(pool, 0);
  nf_reading reading = {0, 0, 0};
  int64_t polled = 0, since = 0;
  for (int patient = 1; atomic_load_explicit(&pool->done, memory_order_acquire) < tasks;) {
    if (atomic_load_explicit(&pool->stop, memory_order_relaxed)) break; /* a worker is lost: see nf_pool_fail */
    if (patient) patient = poll(pool, &reading, 0, &polled, &since);
    else nf_yield(); /* a worker was interrupted in mid-task */
  }
  return atomic_load(&pool->error) ? -1 : 0;
}

/* Kernels (vec.parallel) state the extent of their next parallel loop, so that shares are even. */
int32_t nf_extent(int32_t extent) {
  nf_pool *pool = nf_own();
  if (pool != NULL) pool->extent = extent;
  return 0;
}

static void prepare(nf_pool *pool) {
  nf_lock_init(&pool->lock);
  nf_signal_init(&pool->wake);
  nf_lock_init(&pool->owner);
  pool->process = nf_process_id();
  pool->workers = 0;
}

/* After fork() a pool has its memory, with locks in any state, but no threads: it goes on without workers. */
static void leave_parent(nf_pool *pool) {
  if (pool->process != nf_process_id()) prepare(pool);
}

void nf_enter(nf_pool *pool) {
  leave_parent(pool);
  nf_lock_take(&pool->owner);
  nf_set_own(pool);
  pool->caller = nf_subnormals_as_zero();
}

void nf_leave(nf_pool *pool) {
  nf_subnormals_restore(pool->caller);
  nf_set_own(NULL);
  nf_lock_give(&pool->owner);
}

#if defined(NF_HOST_THREADS)

static void start_workers(nf_pool *pool, int count) {
#if defined(__wasm_atomics__)
  pool->workers = count - 1 < NF_MAX_THREADS ? count - 1 : NF_MAX_THREADS;
#else
  (void)pool, (void)count; /* one thread: no memory could be shared with others */
#endif
}

/* The work of a worker on a thread that the host has made; returns when the pool ends. */
NF_EXPORT void nf_pool_work(nf_pool *pool) {
  int self = atomic_fetch_add(&pool->inside, 1) + 1;
  if (self <= pool->workers) work(pool, self);
  atomic_fetch_sub(&pool->inside, 1);
}

/* Report for a worker that it has trapped: the replay that waits for it fails. After that the pool can only be
 * freed. */
NF_EXPORT void nf_pool_fail(nf_pool *pool) {
  atomic_store(&pool->error, 1);
  atomic_store(&pool->stop, 1);
  atomic_fetch_sub(&pool->inside, 1);
  wake_all(pool);
}

static void join_workers(nf_pool *pool) {
  while (atomic_load(&pool->inside) > 0) nf_yield();
}

#else

/* The function of a worker's thread: it takes the next index in its pool. */
static void work_as_one(void *given) {
  nf_pool *pool = given;
  work(pool, atomic_fetch_add(&pool->inside, 1) + 1);
}

static void start_workers(nf_pool *pool, int count) {
  int started = 0;
  while (started + 1 < count && started < NF_MAX_THREADS) {
    if (!nf_thread_start(&pool->threads[started], work_as_one, pool)) break;
    started++;
  }
  pool->workers = started;
}

static void join_workers(nf_pool *pool) {
  for (int i = 0; i < pool->workers; i++) nf_thread_join(&pool->threads[i]);
}

#endif

/* Make a pool of `count` threads, the caller's included (fewer if the system refuses more), on `cores` cores (0:
 * unknown); NULL if there is no memory for it. */
NF_EXPORT nf_pool *nf_pool_new(int count, int cores) {
  nf_pool *pool = nf_memory_new(sizeof(nf_pool));
  if (pool == NULL) return NULL;
  *pool = (nf_pool){0};
  prepare(pool);
  nf_set_hooks();
  pool->patience = cores > 0 && count > cores ? NF_PATIENCE_CROWDED : NF_PATIENCE;
  start_workers(pool, count);
  return pool;
}

/* The number of the pool's threads in this process, the caller's included. */
NF_EXPORT int nf_pool_threads(nf_pool *pool) {
  leave_parent(pool);
  return pool->workers + 1;
}

/* End the threads, after a replay that is under way, and free the pool. */
NF_EXPORT void nf_pool_free(nf_pool *pool) {
  leave_parent(pool);
  nf_lock_take(&pool->owner);
  atomic_store(&pool->stop, 1);
  wake_all(pool);
  join_workers(pool);
  nf_lock_give(&pool->owner);
  nf_lock_destroy(&pool->owner);
  nf_signal_destroy(&pool->wake);
  nf_lock_destroy(&pool->lock);
  nf_memory_free(pool);
}
