/* The functions that TVM's code calls through pointers. Each object that uses one defines a null pointer of this
 * name, and the linker takes any of them. The pointers are set when a pool is made, because not every linker would
 * prefer a definition here to theirs.
 */
#include "runtime.h"

NF_SHARED int (*__TVMBackendParallelLaunch)(nf_lambda, void *, int) = NULL;
NF_SHARED void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = NULL;
NF_SHARED int (*__TVMBackendFreeWorkspace)(int, int, void *) = NULL;

/* Local buffers beyond 1 KiB, which TVM does not keep on the stack. */
static void *alloc_workspace(int device, int id, uint64_t bytes, int code, int bits) {
  (void)device, (void)id, (void)code, (void)bits;
  return nf_memory_new((size_t)((bytes + 63) / 64 * 64));
}

static int free_workspace(int device, int id, void *memory) {
  (void)device, (void)id;
  nf_memory_free(memory);
  return 0;
}

void nf_set_hooks(void) {
  __TVMBackendParallelLaunch = nf_parallel_launch;
  __TVMBackendAllocWorkspace = alloc_workspace;
  __TVMBackendFreeWorkspace = free_workspace;
}
