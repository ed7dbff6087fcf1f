/* Chooses the kernel that PyTorch's scaled_dot_product_attention runs on a GPU.
 *
 * Follows native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h: the first enabled kernel in PyTorch's order that
 * accepts the call. Gradients, nested tensors and dropout are left out. trace.h describes the kernel's memory. */
#ifndef VM_SDPA_H
#define VM_SDPA_H

#include "../../vm.h"

typedef enum vm_attention_kernel {
    VM_ATTENTION_USUAL, /* flash if possible, then memory-efficient, then math; before them cuDNN's if it comes first */
    VM_ATTENTION_FLASH,
    VM_ATTENTION_EFFICIENT,
    VM_ATTENTION_MATH,
    VM_ATTENTION_CUDNN,
    VM_ATTENTION_KERNELS
} vm_attention_kernel;
extern const char *const vm_attention_kernel_name[VM_ATTENTION_KERNELS];

/* Queries, keys or values: (batch, heads, length, depth) if dims is 4. */
typedef struct vm_heads {
    size_t dims;
    uint64_t batch, heads, length, depth;
    bool strided;  /* the elements of a head are not adjacent: their stride is not 1 */
    bool by_token; /* all heads of a token precede the next token: (batch, length, heads, depth) */
} vm_heads;

/* A call of scaled_dot_product_attention. */
typedef struct vm_sdpa {
    vm_dtype dtype;
    vm_heads q, k, v;
    bool masked, boolean;    /* whether there is a mask, and whether its elements are booleans */
    bool mask_strided;       /* the elements of a mask's row are not adjacent */
    bool causal, grouped;    /* is_causal, enable_gqa */
    uint64_t mask, mask_row; /* the mask's elements in total, and in one row (a query's keys) */
} vm_sdpa;

typedef struct vm_trace_gpu {
    int sm; /* compute capability, 89 for 8.9 */
    int multiprocessors;
    uint64_t free_bytes; /* free memory when the call begins; 0: unlimited */
    int cudnn;           /* cuDNN's version if PyTorch tries its attention first (as in vm_lookup_torch), otherwise 0 */
} vm_trace_gpu;

/* *out: the first enabled kernel that accepts the call on a card. VM_EINVAL if none does; PyTorch raises then. */
vm_status vm_sdpa_choose(const vm_sdpa *call, const vm_trace_gpu *gpu, const vm_attention_kernel *enabled, size_t count,
                         vm_attention_kernel *out);

#endif
