/* What a WebAssembly module has beside its kernels: the replayer of plans, and a pool whose threads are workers of
 * the host (docs/wasm.md). No operating system, no allocator; one pool to a memory.
 */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define NF_EXPORT(name) __attribute__((export_name(#name)))

/* Polls before a worker sleeps. Short: a browser's threads share few cores with the page. */
enum { NF_SPINS = 2000, NF_TASKS_PER_THREAD = 8, NF_ERROR_BYTES = 1024 };

typedef struct {
  void *sync_handle;
  int32_t num_task;
} nf_group;
typedef int (*nf_lambda)(int task, nf_group *group, void *data);

/* `word` is epoch:32 | tasks:16 | next:16. Adding one to it claims task `next` if that is below `tasks`; a launch ends
 * when all its tasks are done, so lambda and data of a claimed task cannot change under the claimer. */
typedef struct {
  _Alignas(64) _Atomic uint64_t word;
  _Alignas(64) atomic_int done;
  _Alignas(64) nf_lambda lambda;
  void *data;
  atomic_int error;
  atomic_int lost; /* a thread died in a task: no launch ends any more */
  _Alignas(64) atomic_int sleepers;
  atomic_int wakings; /* what sleepers wait on */
  atomic_int stop;
  int workers; /* beside the calling thread */
} nf_pool;

static nf_pool the_pool;
static char error_text[NF_ERROR_BYTES];

static inline uint32_t word_epoch(uint64_t word) { return (uint32_t)(word >> 32); }
static inline uint32_t word_tasks(uint64_t word) { return (uint32_t)(word >> 16) & 0xffff; }
static inline uint32_t word_next(uint64_t word) { return (uint32_t)word & 0xffff; }

static void run_tasks(nf_pool *pool) {
  for (;;) {
    uint64_t word = atomic_load(&pool->word);
    if (word_next(word) >= word_tasks(word)) return; /* look before adding, so that `next` cannot run over */
    word = atomic_fetch_add(&pool->word, 1);
    if (word_next(word) >= word_tasks(word)) return;
    nf_group group = {0, (int32_t)word_tasks(word)};
    if (pool->lambda((int)word_next(word), &group, pool->data) != 0) atomic_store(&pool->error, 1);
    atomic_fetch_add(&pool->done, 1);
  }
}

static uint32_t wait_for_launch(nf_pool *pool, uint32_t seen) {
  for (int i = 0; i < NF_SPINS; i++) {
    if (word_epoch(atomic_load(&pool->word)) != seen || atomic_load(&pool->stop)) break;
  }
  for (;;) {
    int32_t wakings = atomic_load(&pool->wakings);
    atomic_fetch_add(&pool->sleepers, 1);
    uint32_t epoch = word_epoch(atomic_load(&pool->word));
    int ready = epoch != seen || atomic_load(&pool->stop);
    if (!ready) __builtin_wasm_memory_atomic_wait32((int32_t *)&pool->wakings, wakings, -1);
    atomic_fetch_sub(&pool->sleepers, 1);
    if (ready) return epoch;
  }
}

static void wake_all(nf_pool *pool) {
  atomic_fetch_add(&pool->wakings, 1);
  __builtin_wasm_memory_atomic_notify((int32_t *)&pool->wakings, UINT32_MAX);
}

static int parallel_launch(nf_lambda lambda, void *data, int num_task) {
  nf_pool *pool = &the_pool;
  if (pool->workers == 0) {
    nf_group group = {0, 1};
    return lambda(0, &group, data);
  }
  if (num_task <= 0) num_task = (pool->workers + 1) * NF_TASKS_PER_THREAD;
  pool->lambda = lambda;
  pool->data = data;
  atomic_store(&pool->done, 0);
  atomic_store(&pool->error, 0);
  uint64_t epoch = (uint64_t)word_epoch(atomic_load(&pool->word)) + 1;
  atomic_store(&pool->word, epoch << 32 | (uint64_t)num_task << 16);
  if (atomic_load(&pool->sleepers) > 0) wake_all(pool);
  run_tasks(pool);
  while (atomic_load(&pool->done) < num_task) {
    if (atomic_load(&pool->lost)) return -1;
  }
  return atomic_load(&pool->error) || atomic_load(&pool->lost) ? -1 : 0;
}

int (*__TVMBackendParallelLaunch)(nf_lambda, void *, int) = parallel_launch;

NF_EXPORT(nf_pool_new) nf_pool *nf_pool_new(int count) {
  the_pool.workers = count - 1;
  atomic_store(&the_pool.stop, 0);
  return &the_pool;
}

NF_EXPORT(nf_pool_work) void nf_pool_work(nf_pool *pool) {
  uint32_t seen = 0;
  while (!atomic_load(&pool->stop)) {
    seen = wait_for_launch(pool, seen);
    run_tasks(pool);
  }
}

NF_EXPORT(nf_pool_free) void nf_pool_free(nf_pool *pool) {
  atomic_store(&pool->stop, 1);
  wake_all(pool);
}

static void say(const char *text) {
  size_t at = 0;
  while (at + 1 < NF_ERROR_BYTES && error_text[at] != 0) at++;
  while (at + 1 < NF_ERROR_BYTES && *text != 0) error_text[at++] = *text++;
  error_text[at] = 0;
}

NF_EXPORT(nf_pool_fail) void nf_pool_fail(nf_pool *pool) {
  error_text[0] = 0;
  say("a thread was lost");
  atomic_store(&pool->lost, 1);
}

/* Kernels call it where an argument is not what they were compiled for. */
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  error_text[0] = 0;
  say(kind);
  say(": ");
  for (int32_t i = 0; i < count; i++) say(parts[i]);
}

NF_EXPORT(nf_error) const char *nf_error(void) { return error_text; }

typedef struct {
  int32_t type_index;
  uint32_t zero;
  union {
    void *pointer;
    uint64_t bits;
  } value;
} nf_any;
_Static_assert(sizeof(nf_any) == 16, "kernels take arguments of 16 bytes");

typedef struct {
  int (*function)(void *self, const nf_any *args, int32_t count, nf_any *result);
  const nf_any *args;
  int64_t count;
  const void *weights;
  int64_t bytes;
} nf_launch;
_Static_assert(sizeof(nf_launch) == 32, "hosts write launches byte by byte");

NF_EXPORT(nf_replay) int32_t nf_replay(nf_pool *pool, const nf_launch *launches, int32_t n) {
  for (int32_t i = 0; i < n; i++) {
    nf_any result = {0};
    if (atomic_load(&pool->lost)) return i;
    if (launches[i].function(NULL, launches[i].args, (int32_t)launches[i].count, &result) != 0) return i;
  }
  return -1;
}
