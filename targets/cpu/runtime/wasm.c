/* What a module has instead of a libc: some memory, and the errors of kernels. */
#include "runtime.h"

/* Blocks lie behind each other in the arena; a header of a line goes before each. */
typedef struct nf_block {
  size_t bytes;
  struct nf_block *next; /* of those that are free */
} nf_block;

enum { NF_HEADER = 64, NF_ARENA = 256 << 10 }; /* a pool, and the larger local buffers of the kernels at work */

static _Alignas(64) unsigned char arena[NF_ARENA];
static nf_lock guard;
static nf_block *unused;
static size_t used;

/* A free block that is not more than twice too large. */
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

/* Memory at a multiple of 64 bytes; NULL where there is no more. */
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

/* The kernel's refusal, as text that ends with a zero; empty where there was none. */
NF_EXPORT const char *nf_error(void) { return message; }

/* tvm-ffi's function of this name, which kernels call. */
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  size_t at = 0;
  (void)kind;
  for (int32_t i = 0; i < count; i++)
    for (const char *part = parts[i]; part != NULL && *part != 0 && at + 1 < sizeof(message); part++)
      message[at++] = *part;
  message[at] = 0;
}
