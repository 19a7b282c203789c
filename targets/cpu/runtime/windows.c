/* What a library has instead of a C runtime's start. */
#include "runtime.h"

DWORD nf_slot = TLS_OUT_OF_INDEXES;

/* The entry point (link.py names it): once when the library is loaded, once when it goes. */
BOOL WINAPI DllMain(HINSTANCE library, DWORD reason, LPVOID reserved) {
  (void)library, (void)reserved;
  if (reason == DLL_PROCESS_ATTACH) nf_slot = TlsAlloc();
  if (reason == DLL_PROCESS_DETACH) TlsFree(nf_slot);
  return nf_slot != TLS_OUT_OF_INDEXES;
}

/* Code for floating point refers to it; the C runtime has it otherwise. */
int _fltused = 0;
