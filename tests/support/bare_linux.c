/* Of the C library what the probe of tests/unit/test_link.py calls, by system calls of Linux: zig takes 45 CPU seconds
 * to build a static libc for a platform, and none for this.
 */
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static long call(long number, long a, long b, long c, long d, long e, long f) {
#if defined(__x86_64__)
  register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
  __asm__ volatile("syscall"
                   : "+a"(number)
                   : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory", "cc");
  return number;
#else
  register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
  register long x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory", "cc");
  return x0;
#endif
}

_Noreturn void _exit(int status) {
  for (;;) call(SYS_exit_group, status, 0, 0, 0, 0, 0);
}

void *mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset) {
  return (void *)call(SYS_mmap, (long)at, (long)bytes, protection, flags, file, offset);
}

int mprotect(void *at, size_t bytes, int protection) {
  return (int)call(SYS_mprotect, (long)at, (long)bytes, protection, 0, 0, 0);
}

int sigaltstack(const stack_t *given, stack_t *before) {
  return (int)call(SYS_sigaltstack, (long)given, (long)before, 0, 0, 0, 0);
}

#if defined(__x86_64__)
void handled(void);
__asm__("handled:\n  mov $15, %eax\n  syscall\n"); /* rt_sigreturn */
enum { RESTORER = 0x04000000 };
#else
enum { RESTORER = 0 };
#define handled NULL /* the kernel brings its own */
#endif

int sigaction(int number, const struct sigaction *given, struct sigaction *before) {
  struct {
    void (*handler)(int, siginfo_t *, void *);
    unsigned long flags;
    void (*restorer)(void);
    unsigned long mask;
  } kernels = {given->sa_sigaction, (unsigned long)given->sa_flags | RESTORER, handled, 0};
  (void)before;
  return (int)call(SYS_rt_sigaction, number, (long)&kernels, 0, sizeof kernels.mask, 0, 0);
}

void *memset(void *at, int value, size_t bytes) {
  for (volatile char *each = at; bytes > 0; bytes--) *each++ = (char)value;
  return at;
}

void *memcpy(void *to, const void *from, size_t bytes) {
  const char *next = from;
  for (volatile char *each = to; bytes > 0; bytes--) *each++ = *next++;
  return to;
}

int main(void);
#if defined(__x86_64__)
__attribute__((force_align_arg_pointer))
#endif
void _start(void) {
  _exit(main());
}
