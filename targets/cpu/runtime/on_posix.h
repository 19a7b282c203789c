/* Linux, macOS, Android. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define NF_EXPORT __attribute__((visibility("default")))
#define NF_SHARED __attribute__((weak))

typedef pthread_mutex_t nf_lock;
typedef pthread_cond_t nf_signal;
typedef pid_t nf_process;

static inline void nf_lock_init(nf_lock *lock) { pthread_mutex_init(lock, NULL); }
static inline void nf_lock_destroy(nf_lock *lock) { pthread_mutex_destroy(lock); }
static inline void nf_lock_take(nf_lock *lock) { pthread_mutex_lock(lock); }
static inline void nf_lock_give(nf_lock *lock) { pthread_mutex_unlock(lock); }

static inline void nf_signal_init(nf_signal *signal) { pthread_cond_init(signal, NULL); }
static inline void nf_signal_destroy(nf_signal *signal) { pthread_cond_destroy(signal); }
static inline void nf_signal_wait(nf_signal *signal, nf_lock *lock) { pthread_cond_wait(signal, lock); }
static inline void nf_signal_all(nf_signal *signal) { pthread_cond_broadcast(signal); }

typedef struct {
  pthread_t id;
  void (*work)(void *);
  void *argument;
} nf_thread;

static inline void *nf_thread_main(void *given) {
  nf_thread *thread = given;
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "nearfar-cpu"); /* for top and profilers */
#elif defined(__APPLE__)
  pthread_setname_np("nearfar-cpu");
#endif
  thread->work(thread->argument);
  return NULL;
}

static inline int nf_thread_start(nf_thread *thread, void (*work)(void *), void *argument) {
  thread->work = work;
  thread->argument = argument;
  return pthread_create(&thread->id, NULL, nf_thread_main, thread) == 0;
}

static inline void nf_thread_join(nf_thread *thread) { pthread_join(thread->id, NULL); }

static inline nf_process nf_process_id(void) { return getpid(); }

/* malloc's own address is stored before the aligned one that is returned. posix_memalign of glibc before 2.38 frees
 * the bytes before an aligned address apart from the others: memory that a kernel frees then does not fit the same
 * request again, and the process grows by it with each launch.
 */
static inline void *nf_memory_new(size_t bytes) {
  char *given = malloc(bytes + 64);
  if (given == NULL) return NULL;
  char *memory = (char *)(((uintptr_t)given + 64) & ~(uintptr_t)63);
  ((void **)memory)[-1] = given;
  return memory;
}
static inline void nf_memory_free(void *memory) {
  if (memory != NULL) free(((void **)memory)[-1]);
}

#define NF_CLOCK 1
static inline int64_t nf_now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}
static inline void nf_yield(void) { sched_yield(); }

static _Thread_local void *nf_own_value;
static inline void *nf_own(void) { return nf_own_value; }
static inline void nf_set_own(void *value) { nf_own_value = value; }
