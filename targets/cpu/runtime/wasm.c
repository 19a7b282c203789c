/* Replaces a libc in a module: an allocator over a fixed arena, and the errors of kernels. */
#include "runtime.h"

/* Blocks follow one another in the arena; each has a header of a cache line before it. */
typedef struct nf_block {
  size_t bytes;
  struct nf_block *next; /* the next free block */
} nf_block;

enum { NF_HEADER = 64, NF_ARENA = 256 << 10 }; /* for a pool, and for larger local buffers of running kernels */

static _Alignas(64) unsigned char arena[NF_ARENA];
static nf_lock guard;
static nf_block *unused;
static size_t used;

/* A free block that is at most twice as large as needed. */
static nf_block *reuse(size_t bytes) {
  for (nf_block **at = &unused; *at != NULL; at = &(*at)->next) {
    nf_block *block = *at;
    if (block->bytes >= bytes && block->bytes / 2 <= bytes) {
      *at = block->next;
      return block;
    }
  }
  return NULL;
}

static nf_block *extend(size_t bytes) {
  if (bytes + NF_HEADER > NF_ARENA - used) return NULL;
  nf_block *block = (nf_block *)&arena[used];
  block->bytes = bytes;
  used += NF_HEADER + bytes;
  return block;
}

/* Memory at a multiple of 64 bytes; NULL if the arena is full. */
void *nf_memory_new(size_t bytes) {
  if (bytes > NF_ARENA) return NULL;
  bytes = (bytes + 63) & ~(size_t)63;
  nf_lock_take(&guard);
  nf_block *block = reuse(bytes);
  if (block == NULL) block = extend(bytes);
  nf_lock_give(&guard);
  return block == NULL ? NULL : (char *)block + NF_HEADER;
}

void nf_memory_free(void *memory) {
  if (memory == NULL) return;
  nf_block *block = (nf_block *)((char *)memory - NF_HEADER);
  nf_lock_take(&guard);
  block->next = unused;
  unused = block;
  nf_lock_give(&guard);
}

static char message[512];

/* The error of the kernel that failed, as text that ends with a zero; empty if there was none. */
NF_EXPORT const char *nf_error(void) { return message; }

/* Replaces tvm-ffi's function of this name, which kernels call. */
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  size_t at = 0;
  (void)kind;
  for (int32_t i = 0; i < count; i++)
    for (const char *part = parts[i]; part != NULL && *part != 0 && at + 1 < sizeof(message); part++)
      message[at++] = *part;
  message[at] = 0;
}
