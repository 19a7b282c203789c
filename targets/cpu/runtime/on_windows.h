/* Windows 10 and later, without a C runtime: only functions of kernel32 and ucrtbase are called (link.py lists them),
 * so no compiler's library is linked or needed. There is no fork, so a constant stands for the process's id.
 */
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <stddef.h>
#include <stdint.h>
#include <windows.h>

#define NF_EXPORT __declspec(dllexport)
#define NF_SHARED __declspec(selectany)

typedef SRWLOCK nf_lock;
typedef CONDITION_VARIABLE nf_signal;
typedef int nf_process;

static inline void nf_lock_init(nf_lock *lock) { InitializeSRWLock(lock); }
static inline void nf_lock_destroy(nf_lock *lock) { (void)lock; }
static inline void nf_lock_take(nf_lock *lock) { AcquireSRWLockExclusive(lock); }
static inline void nf_lock_give(nf_lock *lock) { ReleaseSRWLockExclusive(lock); }

static inline void nf_signal_init(nf_signal *signal) { InitializeConditionVariable(signal); }
static inline void nf_signal_destroy(nf_signal *signal) { (void)signal; }
static inline void nf_signal_wait(nf_signal *signal, nf_lock *lock) {
  SleepConditionVariableSRW(signal, lock, INFINITE, 0);
}
static inline void nf_signal_all(nf_signal *signal) { WakeAllConditionVariable(signal); }

typedef struct {
  HANDLE handle;
  void (*work)(void *);
  void *argument;
} nf_thread;

static inline DWORD WINAPI nf_thread_main(void *given) {
  nf_thread *thread = given;
  thread->work(thread->argument);
  return 0;
}

static inline int nf_thread_start(nf_thread *thread, void (*work)(void *), void *argument) {
  thread->work = work;
  thread->argument = argument;
  thread->handle = CreateThread(NULL, 0, nf_thread_main, thread, 0, NULL);
  return thread->handle != NULL;
}

static inline void nf_thread_join(nf_thread *thread) {
  WaitForSingleObject(thread->handle, INFINITE);
  CloseHandle(thread->handle);
}

static inline nf_process nf_process_id(void) { return 0; }

/* The heap's own address is stored before the aligned one that is returned. */
static inline void *nf_memory_new(size_t bytes) {
  char *given = HeapAlloc(GetProcessHeap(), 0, bytes + 128);
  if (given == NULL) return NULL;
  char *memory = (char *)(((uintptr_t)given + 127) & ~(uintptr_t)63);
  ((void **)memory)[-1] = given;
  return memory;
}
static inline void nf_memory_free(void *memory) {
  if (memory != NULL) HeapFree(GetProcessHeap(), 0, ((void **)memory)[-1]);
}

extern DWORD nf_slot; /* windows.c: allocated when the library is loaded */
static inline void *nf_own(void) { return TlsGetValue(nf_slot); }
static inline void nf_set_own(void *value) { TlsSetValue(nf_slot, value); }

#define NF_CLOCK 1
static inline int64_t nf_now(void) {
  LARGE_INTEGER ticks, second;
  QueryPerformanceCounter(&ticks);
  QueryPerformanceFrequency(&second);
  int64_t whole = ticks.QuadPart / second.QuadPart, rest = ticks.QuadPart % second.QuadPart;
  return whole * 1000000000 + rest * 1000000000 / second.QuadPart;
}
static inline void nf_yield(void) { SwitchToThread(); }
