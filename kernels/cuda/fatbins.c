/* Our kernels' machine code from nvcc, as bytes of the extension; setup.py makes it first. */
#include "gpu.h"

#define VM_EMBED(NAME, FATBIN)                                                                                      \
    __asm__(".pushsection .nv_fatbin, \"a\"\n.balign 16\n.global vm_fatbin_" #FATBIN "\n.hidden vm_fatbin_" #FATBIN \
            "\nvm_fatbin_" #FATBIN ":\n.incbin \"" VM_FATBINS "/" #FATBIN ".fatbin\"\n.balign 16\n.popsection");
VM_GPU_KERNELS(VM_EMBED)
