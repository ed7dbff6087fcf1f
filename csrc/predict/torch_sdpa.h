/* Which kernel PyTorch's scaled_dot_product_attention runs on a GPU.
 *
 * After native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h: the first kernel of PyTorch's order that is enabled
 * and has nothing against the call. Gradients, nested tensors and dropout are left out. torch_trace.h says what the
 * kernel then takes. */
#ifndef VM_TORCH_SDPA_H
#define VM_TORCH_SDPA_H

#include "../vm.h"

typedef enum vm_attention_kernel {
    VM_ATTENTION_USUAL, /* flash where it can be, else memory-efficient, else math: PyTorch's order without cuDNN */
    VM_ATTENTION_FLASH,
    VM_ATTENTION_EFFICIENT,
    VM_ATTENTION_MATH,
    VM_ATTENTION_CUDNN,
    VM_ATTENTION_KERNELS
} vm_attention_kernel;
extern const char *const vm_attention_kernel_name[VM_ATTENTION_KERNELS];

/* Queries, keys or values: (batch, heads, length, depth) where there are 4 dimensions. */
typedef struct vm_heads {
    size_t dims;
    uint64_t batch, heads, length, depth;
    bool strided;  /* the elements of a head do not lie side by side: their stride is not 1 */
    bool by_token; /* all heads of a token lie before the next token: (batch, length, heads, depth) */
} vm_heads;

/* A call of scaled_dot_product_attention. */
typedef struct vm_sdpa {
    vm_dtype dtype;
    vm_heads q, k, v;
    bool masked, boolean;    /* whether there is a mask, and whether its elements are booleans */
    bool causal, grouped;    /* is_causal, enable_gqa */
    uint64_t mask, mask_row; /* the mask's elements in all, and of one row (a query's keys) */
} vm_sdpa;

/* The first of the enabled kernels that takes the call on a card of compute capability `sm` (89 for 8.9). VM_EINVAL
 * where none does, as PyTorch raises. */
vm_status vm_sdpa_choose(const vm_sdpa *call, int sm, const vm_attention_kernel *enabled, size_t count,
                         vm_attention_kernel *out);

#endif
