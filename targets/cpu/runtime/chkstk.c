/* Windows maps a stack page by page: code with a frame of more than one page first calls this, which a C
 * runtime usually defines. It touches every page of the frame in turn, the nearest first, and changes no register
 * that the caller may use. x86_64: rax has the size in bytes; aarch64: x15 has it in units of 16 bytes, and x16 and
 * x17 are scratch registers. (LLVM: X86FrameLowering, AArch64FrameLowering.)
 */
#if defined(__x86_64__)
__asm__(
    ".globl ___chkstk_ms\n"
    "___chkstk_ms:\n"
    "  pushq %rax\n"
    "  pushq %rcx\n"
    "  leaq 24(%rsp), %rcx\n" /* the caller's stack pointer */
    "1:\n"
    "  cmpq $4096, %rax\n"
    "  jbe 2f\n"
    "  subq $4096, %rcx\n"
    "  orq $0, (%rcx)\n"
    "  subq $4096, %rax\n"
    "  jmp 1b\n"
    "2:\n"
    "  subq %rax, %rcx\n"
    "  orq $0, (%rcx)\n"
    "  popq %rcx\n"
    "  popq %rax\n"
    "  ret\n");
#elif defined(__aarch64__)
__asm__(
    ".globl __chkstk\n"
    "__chkstk:\n"
    "  lsl x16, x15, #4\n"
    "  mov x17, sp\n"
    "1:\n"
    "  cmp x16, #4096\n"
    "  b.ls 2f\n"
    "  sub x17, x17, #4096\n"
    "  ldr xzr, [x17]\n"
    "  sub x16, x16, #4096\n"
    "  b 1b\n"
    "2:\n"
    "  sub x17, x17, x16\n"
    "  ldr xzr, [x17]\n"
    "  ret\n");
#endif
