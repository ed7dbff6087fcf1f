/* Why each kernel rejects a call, and the first kernel that accepts it. */
#include <stdio.h>
#include <string.h>

#include "sdpa.h"

const char *const vm_attention_kernel_name[VM_ATTENTION_KERNELS] = {[VM_ATTENTION_USUAL] = "usual",
                                                                    [VM_ATTENTION_FLASH] = "flash",
                                                                    [VM_ATTENTION_EFFICIENT] = "efficient",
                                                                    [VM_ATTENTION_MATH] = "math",
                                                                    [VM_ATTENTION_CUDNN] = "cudnn"};

/* Returns: why no fused kernel accepts a call, or NULL. grouped: whether the kernel lets queries share keys. */
static const char *any_rejects(const vm_sdpa *c, bool grouped) {
    const vm_heads *q = &c->q, *k = &c->k, *v = &c->v;
    if (c->mask_strided) return "needs the elements of a mask's row side by side";
    if (q->dims != 4 || k->dims != 4 || v->dims != 4) return "needs 4 dimensions";
    if (q->batch != k->batch || q->batch != v->batch) return "needs one size of batch";
    const bool shares = grouped && c->grouped && k->heads == v->heads && k->heads && q->heads % k->heads == 0;
    if ((q->heads != k->heads || q->heads != v->heads) && !shares)
        return "needs as many heads of keys and values as of queries";
    return q->length && k->length && v->length ? NULL : "needs sequences of 1 or more";
}

static bool is_dense(const vm_heads *h) { return !h->strided || h->depth == 1; }

static bool all_dense(const vm_sdpa *c) { return is_dense(&c->q) && is_dense(&c->k) && is_dense(&c->v); }

static bool is_new_and_half(const vm_sdpa *c, int sm) { return c->dtype != VM_F32 && sm >= 80; }

static const char *flash_rejects(const vm_sdpa *c, int sm) {
    if (!is_new_and_half(c, sm)) return "needs half precision and compute capability 8.0";
    if (c->masked) return "takes no mask";
    if (c->q.depth != c->k.depth || c->q.depth != c->v.depth || c->q.depth > 256)
        return "needs heads of one depth, 256 at most";
    if (c->causal && c->q.length != c->k.length) return "needs as many queries as keys with is_causal";
    return all_dense(c) ? any_rejects(c, true) : "needs the elements of a head side by side";
}

/* The memory-efficient kernel needs aligned rows (minimum_gemm_alignment), and new cards for bfloat16. */
static const char *efficient_rejects(const vm_sdpa *c, int sm) {
    static const char *const depths[] = {
        [1] = "needs heads of queries and keys of one depth, a multiple of 1, and of values too",
        [4] = "needs heads of queries and keys of one depth, a multiple of 4, and of values too",
        [8] = "needs heads of queries and keys of one depth, a multiple of 8, and of values too"};
    const bool half = c->dtype != VM_F32;
    const uint64_t unit = half && sm >= 70 ? 8 : !half && sm >= 80 ? 4 : 1, q = c->q.depth, v = c->v.depth;
    if (c->dtype == VM_BF16 && sm < 80) return "needs compute capability 8.0 for bfloat16";
    if (q != c->k.depth || q % unit || v % unit || !q || !v) return depths[unit];
    if (c->q.strided || c->k.strided || c->v.strided) return "needs the elements of a head side by side";
    return any_rejects(c, false);
}

/* cuDNN 9.10 and later take 256 channels on Hopper. */
static const char *cudnn_rejects(const vm_sdpa *c, const vm_trace_gpu *gpu) {
    const uint64_t q = c->q.depth, k = c->k.depth, v = c->v.depth,
                   most = gpu->sm == 90 && gpu->cudnn >= 91000 ? 256 : 128;
    if (!is_new_and_half(c, gpu->sm)) return "needs half precision and compute capability 8.0";
    if (q % 8 || k % 8 || v % 8 || q > most || k > most || v > most)
        return most == 256 ? "needs heads of a multiple of 8 channels, 256 at most"
                           : "needs heads of a multiple of 8 channels, 128 at most";
    if (c->k.length == 1) return "needs more than one key";
    return all_dense(c) ? any_rejects(c, true) : "needs the elements of a head side by side";
}

static const char *rejects(const vm_sdpa *c, vm_attention_kernel kernel, const vm_trace_gpu *gpu) {
    switch (kernel) {
    case VM_ATTENTION_FLASH: return flash_rejects(c, gpu->sm);
    case VM_ATTENTION_EFFICIENT: return efficient_rejects(c, gpu->sm);
    case VM_ATTENTION_CUDNN: return cudnn_rejects(c, gpu);
    default: return NULL;
    }
}

vm_status vm_sdpa_choose(const vm_sdpa *call, const vm_trace_gpu *gpu, const vm_attention_kernel *enabled, size_t count,
                         vm_attention_kernel *out) {
    char reasons[VM_SENTENCE] = "";
    for (size_t i = 0; i < count; i++) {
        const char *why = rejects(call, *out = enabled[i], gpu);
        if (!why) return VM_OK;
        const size_t used = strlen(reasons);
        snprintf(reasons + used, sizeof reasons - used, "%s%s %s", i ? "; " : "", vm_attention_kernel_name[enabled[i]],
                 why);
    }
    return vm_fail(
        VM_EINVAL,
        "scaled_dot_product_attention: expected an enabled kernel that takes this call, got %s: PyTorch would raise",
        *reasons ? reasons : "none");
}
