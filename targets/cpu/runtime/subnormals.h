/* How a thread treats subnormal float32 numbers, whose magnitude is below 1.2e-38.
 *
 * On x86 an operation with a subnormal input or result takes a hundred cycles or more. SiLU of -80 is 1e-33, and the
 * scale of a group of such inputs is subnormal: the products of a down projection took twice as long. Kernels
 * therefore take subnormal numbers as zero. Conversions of float16 are not affected: subnormal float16 numbers, which
 * scales of matrices can be, are normal as float32.
 */
#ifndef NF_SUBNORMALS_H
#define NF_SUBNORMALS_H

#if defined(__x86_64__) || defined(__i386__)

enum { NF_INPUTS_ARE_ZERO = 1 << 6, NF_RESULTS_ARE_ZERO = 1 << 15 }; /* MXCSR: DAZ and FTZ */

/* Take subnormal numbers as zero in this thread. Returns what nf_subnormals_restore needs. */
static inline unsigned nf_subnormals_as_zero(void) {
  unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | NF_INPUTS_ARE_ZERO | NF_RESULTS_ARE_ZERO);
  return before;
}

static inline void nf_subnormals_restore(unsigned before) { __builtin_ia32_ldmxcsr(before); }

#else

/* Other processors compute with subnormal numbers at full speed, and WebAssembly has no such choice. */
static inline unsigned nf_subnormals_as_zero(void) { return 0; }
static inline void nf_subnormals_restore(unsigned before) { (void)before; }

#endif

#endif
