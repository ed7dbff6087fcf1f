/* Our kernels' machine code, made by nvcc before this is compiled (setup.py), as bytes of the extension. */
#include "gpu.h"

#define VM_EMBED(NAME, FATBIN)                                                                                      \
    __asm__(".pushsection .nv_fatbin, \"a\"\n.balign 16\n.global vm_fatbin_" #FATBIN "\n.hidden vm_fatbin_" #FATBIN \
            "\nvm_fatbin_" #FATBIN ":\n.incbin \"" VM_FATBINS "/" #FATBIN ".fatbin\"\n.balign 16\n.popsection");
VM_GPU_KERNELS(VM_EMBED)
