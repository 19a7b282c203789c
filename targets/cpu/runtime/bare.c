/* Functions that compilers call implicitly, for systems without a C library. They handle some dozen bytes, so they
 * are simple. */
#include <stddef.h>

void *memset(void *to, int value, size_t bytes);
void *memcpy(void *to, const void *from, size_t bytes);

/* Without the attribute the compiler would replace each body by a call of the function itself. */
__attribute__((no_builtin("memset"))) void *memset(void *to, int value, size_t bytes) {
  char *at = to;
  for (size_t i = 0; i < bytes; i++) at[i] = (char)value;
  return to;
}

__attribute__((no_builtin("memcpy"))) void *memcpy(void *to, const void *from, size_t bytes) {
  char *at = to;
  const char *source = from;
  for (size_t i = 0; i < bytes; i++) at[i] = source[i];
  return to;
}
