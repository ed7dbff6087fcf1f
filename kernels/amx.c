/* Whether AMX's tiles may be used. The processor must have them and, on Linux, the kernel must permit them: it gives
 * room for tiles only to processes that request it. Its answer holds for all threads of the process and for its forks.
 * It refuses if it knows no tiles, if a system call filter blocks the request, or if a signal stack is too small. */
#include "cpu.h"

#ifdef VM_HAVE_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

static bool present(void) {
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 }; /* bits of leaf 7, EDX */
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16) && (d & AMX_TILE);
}

static bool request_tiles(void) {
    enum { TILE_DATA = 18, ARCH_REQ_XCOMP_PERM = 0x1023 }; /* a bit of XCR0; <asm/prctl.h> */
    if (!present()) return false;
#ifdef __linux__
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#else
    return false; /* other systems are untested */
#endif
}

bool vm_amx_permitted(void) {
    static _Atomic int answer; /* 0: unknown yet; threads that ask at the same time get the same answer */
    if (!answer) answer = request_tiles() ? 1 : -1;
    return answer > 0;
}
#endif
