/* Runs CPU artifacts of another processor for tests, under an emulator: memory that it shares with the test, the
 * artifact's library, pools of threads. It reads commands, one a line, and answers each with a line.
 *
 *   symbol NAME           its address, 0 where there is none
 *   pool THREADS          the address of a new pool
 *   replay POOL LAUNCHES N    what nf_replay gives, and what a kernel said
 *   free POOL             0
 *
 * Arguments: the file of the memory, its bytes, the library. It begins with a line: the memory's address.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static char message[512];

/* libtvm_ffi's, which there is none of here. */
__attribute__((visibility("default"))) void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts,
                                                                              int32_t count) {
  (void)kind;
  message[0] = 0;
  for (int32_t i = 0; i < count; i++)
    if (parts[i] != NULL) strncat(message, parts[i], sizeof(message) - strlen(message) - 1);
}

int main(int count, char **arguments) {
  if (count != 4) return 2;
  int file = open(arguments[1], O_RDWR);
  void *memory = mmap(NULL, strtoull(arguments[2], NULL, 10), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  void *library = dlopen(arguments[3], RTLD_NOW);
  if (memory == MAP_FAILED || library == NULL) {
    fprintf(stderr, "%s\n", library == NULL ? dlerror() : "no memory");
    return 1;
  }
  void *(*pool_new)(int, int) = dlsym(library, "nf_pool_new");
  void (*pool_free)(void *) = dlsym(library, "nf_pool_free");
  int32_t (*replay)(void *, const void *, int32_t) = dlsym(library, "nf_replay");
  printf("%" PRIuPTR "\n", (uintptr_t)memory);
  fflush(stdout);
  char line[1024], name[1024];
  uintptr_t pool, launches;
  int n;
  while (fgets(line, sizeof(line), stdin) != NULL) {
    if (sscanf(line, "symbol %1000s", name) == 1) {
      printf("%" PRIuPTR "\n", (uintptr_t)dlsym(library, name));
    } else if (sscanf(line, "pool %d", &n) == 1) {
      printf("%" PRIuPTR "\n", (uintptr_t)pool_new(n, n));
    } else if (sscanf(line, "replay %" SCNuPTR " %" SCNuPTR " %d", &pool, &launches, &n) == 3) {
      message[0] = 0;
      int32_t failed = replay((void *)pool, (const void *)launches, n);
      printf("%d %s\n", failed, message);
    } else if (sscanf(line, "free %" SCNuPTR, &pool) == 1) {
      pool_free((void *)pool);
      printf("0\n");
    } else {
      return 3;
    }
    fflush(stdout);
  }
  return 0;
}
