/* Replaces a C runtime's startup code. */
#include "runtime.h"

DWORD nf_slot = TLS_OUT_OF_INDEXES;

/* The entry point (link.py names it): called once when the library is loaded, and once when it is unloaded. */
BOOL WINAPI DllMain(HINSTANCE library, DWORD reason, LPVOID reserved) {
  (void)library, (void)reserved;
  if (reason == DLL_PROCESS_ATTACH) nf_slot = TlsAlloc();
  if (reason == DLL_PROCESS_DETACH) TlsFree(nf_slot);
  return nf_slot != TLS_OUT_OF_INDEXES;
}

/* Floating-point code refers to this symbol, which a C runtime usually defines. */
int _fltused = 0;
