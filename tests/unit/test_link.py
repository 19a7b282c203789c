"""Libraries for every platform, linked here: their format, exports and imports."""

from __future__ import annotations

import platform as cpu
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

tvm = pytest.importorskip("tvm")

from tvm import tirx  # noqa: E402
from tvm.script.ir_builder import tirx as T  # noqa: E402

from nearfar.errors import BuildError  # noqa: E402
from nearfar.kernels.jobs import Attend, Sample  # noqa: E402
from nearfar.targets.cpu import CpuKernels, link  # noqa: E402
from nearfar.targets.cpu.codegen import compile_library  # noqa: E402
from nearfar.targets.cpu.kernels import vec as v  # noqa: E402
from nearfar.targets.cpu.platforms import PLATFORMS, host, platforms  # noqa: E402
from nearfar.targets.cpu.units import BASELINE  # noqa: E402
from tests.support.binaries import binary  # noqa: E402

N = 1024
FORMATS = {"linux": "elf", "android": "elf", "macos": "macho", "windows": "pe"}
GIVES = {"nf_pool_new", "nf_pool_threads", "nf_pool_free", "nf_replay", "nf_profile", "nf_launch_bytes"}
_LIBC = """
pthread_create pthread_join pthread_setname_np pthread_mutex_init pthread_mutex_destroy pthread_mutex_lock
pthread_mutex_unlock pthread_cond_init pthread_cond_destroy pthread_cond_wait pthread_cond_broadcast
pthread_self sched_yield getpid clock_gettime malloc free memset memcpy memmove bzero
"""
LIBC = set(_LIBC.split())
MATHEMATICS = {"expf", "logf", "powf", "cosf", "sinf"}
# libSystem has these functions, because libcompiler_rt.dylib is part of it
HALVES = {"__extendhfsf2", "__truncsfhf2"}
ASKS = {
    "linux": LIBC | MATHEMATICS | {"__cxa_finalize", "__gmon_start__", "__tls_get_addr"},
    "android": LIBC | MATHEMATICS,
    "macos": LIBC
    | MATHEMATICS
    | HALVES
    | {"__bzero", "_tlv_bootstrap", "dyld_stub_binder", "memset_pattern16"},
    "windows": set(link._KERNEL32.split()) | set(link._UCRT.split()),
}
NEEDS = {
    "linux": {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"},
    "android": {"libc.so", "libm.so"},
    "macos": {"/usr/lib/libSystem.B.dylib"},
    "windows": {"kernel32.dll", "ucrtbase.dll", "tvm_ffi.dll"},
}

BARE = Path(__file__).parents[1] / "support" / "bare_linux.c"
PROBE = r"""
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
enum { PAGE = 4096, PAGES = 9 };
static char *stack;
static char mapped[PAGES];
static int wrong;
/* As Windows does: a page of the stack is there from when it is touched, and only the next one may be. */
static void fault(int number, siginfo_t *info, void *context) {
  (void)number, (void)context;
  intptr_t page = ((char *)info->si_addr - stack) / PAGE;
  if ((char *)info->si_addr < stack || page >= PAGES - 1 || !mapped[page + 1]) _exit(3);
  mapped[page] = 1;
  mprotect(stack + page * PAGE, PAGE, PROT_READ | PROT_WRITE);
}
static void probe(uint64_t bytes, int pages) {
  memset(mapped, 0, sizeof mapped);
  mprotect(stack, PAGE * (PAGES - 1), PROT_NONE);
  mapped[PAGES - 1] = 1;
  char *top = stack + PAGES * PAGE - 64;
#if defined(__x86_64__)
  uint64_t a = bytes, c = 77, d = 88;
  __asm__ volatile("mov %%rsp, %%rbx\n mov %[top], %%rsp\n call ___chkstk_ms\n mov %%rsp, %[top]\n"
                   "mov %%rbx, %%rsp\n"
                   : "+a"(a), "+c"(c), "+d"(d), [top] "+r"(top) : : "rbx", "memory", "cc");
  wrong |= a != bytes || c != 77 || d != 88;
#else
  register uint64_t a __asm__("x15") = bytes / 16;
  register uint64_t c __asm__("x14") = 77;
  __asm__ volatile("mov x19, sp\n mov sp, %[top]\n bl __chkstk\n mov %[top], sp\n mov sp, x19\n"
                   : "+r"(a), "+r"(c), [top] "+r"(top) : : "x16", "x17", "x19", "x30", "memory", "cc");
  wrong |= a != bytes / 16 || c != 77;
#endif
  wrong |= top != stack + PAGES * PAGE - 64;
  int count = 0;
  for (int i = 0; i < PAGES - 1; i++) count += mapped[i];
  wrong |= (count != pages) << 1;
}
int main(void) {
  static char other[65536];
  stack_t apart = {.ss_sp = other, .ss_size = sizeof other};
  sigaltstack(&apart, 0);
  struct sigaction action = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
  sigaction(SIGSEGV, &action, 0);
  stack = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  probe(16, 0);
  probe(PAGE, 1);
  probe(2 * PAGE, 2);
  probe(2 * PAGE + 16, 2);
  probe(7 * PAGE + 4064, 8);
  return wrong;
}
"""
"""A stack whose pages are added one after the other, and a call that needs this many bytes of it."""


def module() -> tvm.IRModule:
    """Features that a platform may lack: a parallel loop, conversions between float16 and float32, e^x, an
    array that is too large for TVM to keep on the stack, and one of several pages that is kept there; all of
    it again under another name.
    """

    def body(x, y):
        with v.parallel(N) as i:
            far, near = T.alloc_buffer((N,), "float32"), v.local((4 * N,), "float32")
            with T.serial(0, N) as j:
                v.put1(far, [j], tirx.exp(v.cast(x[(i + j) % N], "float32")))
                v.put1(near, [4 * j], far[j])
            v.put1(y, [i], v.cast(far[i] + near[4 * (N - 1 - i)], "float16"))

    func = v.prim_func("widen", [("x", (N,), "float16"), ("y", (N,), "float16")], body)
    return tvm.IRModule({name: func.with_attr("global_symbol", name) for name in ("widen", "widen_again")})


@cache
def linked(name: str, folder: Path) -> bytes:
    platform = PLATFORMS[name]
    path = folder / f"{name}-{platform.library}"
    compile_library(module(), path, BASELINE[platform.architecture], platform)
    return path.read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("libraries")


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_library_is_one_of_its_platform(name, folder):
    platform, found = PLATFORMS[name], binary(linked(name, folder))
    assert (found.format, found.architecture) == (FORMATS[platform.system], platform.architecture)
    assert GIVES | {"__tvm_ffi_widen", "__tvm_ffi_widen_again"} <= found.exports
    assert found.undefined - ASKS[platform.system] == {link._FFI}
    assert found.needed <= NEEDS[platform.system]


@pytest.mark.parametrize("name", ["x86_64-windows", "aarch64-windows"])
def test_kernels_with_large_frames_link_for_windows(name, tmp_path):
    """Counts of a sampler and tiles of attention take several pages of a stack."""
    platform = PLATFORMS[name]
    unit = BASELINE[platform.architecture]
    jobs = (Sample(1, 512, 4), Attend(16, 4, 2, 64, 16, 2, 8, "float32", "float16", scale=0.125))
    named = [pair for job in jobs for pair in CpuKernels(unit).stages(job).named(type(job).__name__)]
    module = tvm.IRModule({name: stage.func.with_attr("global_symbol", name) for name, stage in named})
    compile_library(module, tmp_path / platform.library, unit, platform)
    found = binary((tmp_path / platform.library).read_bytes())
    assert (found.format, found.architecture) == ("pe", platform.architecture)


@pytest.mark.parametrize(
    ("architecture", "host"), [("x86_64", ""), ("aarch64", "qemu-aarch64")], ids=["x86_64", "aarch64"]
)
def test_the_stacks_pages_are_touched_in_turn_and_registers_kept(architecture, host, tmp_path):
    """Windows' sources for large frames run on Linux, which has the same calling conventions for them."""
    emulated = [shutil.which(host)] if host else []
    if None in emulated or (not host and cpu.machine() != architecture):
        pytest.skip(f"nothing here runs {architecture}")
    (tmp_path / "main.c").write_text(PROBE)
    for source in (link.RUNTIME / "chkstk.c", BARE):
        shutil.copy(source, tmp_path)
    names = ("main.c", "chkstk.c", BARE.name)
    cc = ["cc", "-target", f"{architecture}-linux-musl"]
    for name in names:  # without -nostdlib, which takes musl's headers away
        options = ["-O1", "-fno-sanitize=undefined", "-fno-stack-protector"]
        link.zig([*cc, *options, "-c", name, "-o", f"{name}.o"], tmp_path)
    link.zig([*cc, "-nostdlib", "-static", *(f"{name}.o" for name in names), "-o", "probe"], tmp_path)
    ended = subprocess.run([*emulated, tmp_path / "probe"], capture_output=True, check=False)
    assert ended.returncode == 0, "1: a register has changed, 2: other pages were touched, 3: one too early"


@pytest.mark.parametrize("name", ["aarch64-macos"])
def test_code_for_apples_processors_is_signed(name, folder):
    """Apple's kernel ends a process that loads unsigned code; an ad hoc signature is enough."""
    assert binary(linked(name, folder)).signed == "ad hoc"


@pytest.mark.parametrize("name", PLATFORMS)
def test_the_same_module_gives_the_same_bytes_and_no_path_of_this_machine(name, folder, tmp_path):
    first, again = linked(name, folder), tmp_path / "again"
    platform = PLATFORMS[name]
    compile_library(module(), again, BASELINE[platform.architecture], platform)
    assert again.read_bytes() == first
    for path in (tmp_path, folder, Path.home(), Path(sys.prefix), link.RUNTIME.resolve()):
        assert f"{path}/".encode() not in first


def test_platforms_are_named_once_and_host_is_one_of_them():
    assert platforms(["host", "aarch64-linux", host().name]) == (host(), PLATFORMS["aarch64-linux"])
    with pytest.raises(
        BuildError, match=r"unknown platform mips-linux: --cpu takes x86_64-linux, .* or host"
    ):
        platforms(["x86_64-linux", "mips-linux"])
    with pytest.raises(BuildError, match=r"unknown platform .none."):
        platforms([])
