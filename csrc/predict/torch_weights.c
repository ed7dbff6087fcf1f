/* The parameters of the VAEs in the order in which Module.to moves them: submodules in the order in which
 * __init__ assigns them, then a module's own parameters, weight before bias. The order decides which small
 * leftovers of segments remain. */
#include <stdio.h>

#include "torch_trace.h"

typedef struct list {
    vm_trace *t;
    const vm_arch *arch;
    size_t element;
    bool diffusers;
    vm_status status;
} list;

static void add(list *l, size_t count, const char *name) {
    uint32_t id;
    if (!l->status) l->status = vm_trace_take(l->t, VM_PRODUCT(count, l->element), name, &id);
}

static void conv(list *l, size_t in, size_t out, size_t side) {
    add(l, VM_PRODUCT(out, in, side, side), "filter");
    add(l, out, "weights");
}

static void linear(list *l, size_t c) {
    add(l, VM_PRODUCT(c, c), "weights");
    add(l, c, "weights");
}

static void norm(list *l, size_t c) {
    add(l, c, "weights");
    add(l, c, "weights");
}

/* Without parameters: its running mean and variance, and how many batches it saw, a 64-bit integer in any dtype. */
static void batch_norm(list *l, size_t c) {
    norm(l, c);
    l->element = sizeof(int64_t);
    add(l, 1, "weights");
}

static void resnet(list *l, size_t in, size_t out) {
    norm(l, in);
    conv(l, in, out, 3);
    norm(l, out);
    conv(l, out, out, 3);
    if (in != out) conv(l, in, out, 1);
}

static void mid(list *l, size_t c) {
    if (!l->diffusers) resnet(l, c, c);
    if (l->arch->mid_block_add_attention) {
        norm(l, c);
        for (int i = 0; i < 4; i++) { /* q, k, v and the projection: linear or 1x1, as many numbers */
            if (l->diffusers)
                linear(l, c);
            else
                conv(l, c, c, 1);
        }
    }
    if (l->diffusers) resnet(l, c, c);
    resnet(l, c, c);
}

static void level(list *l, size_t in, size_t out, size_t resnets, bool resamples) {
    for (size_t i = 0; i < resnets; i++) resnet(l, i ? out : in, out);
    if (resamples) conv(l, out, out, 3);
}

static void encoder(list *l) {
    const vm_arch *a = l->arch;
    const size_t *c = vm_arch_widths(a, VM_ENCODE), last = a->levels - 1;
    conv(l, a->in_channels, c[0], 3);
    for (size_t i = 0; i < a->levels; i++) level(l, c[i ? i - 1 : 0], c[i], a->layers_per_block, i < last);
    mid(l, c[last]);
    norm(l, c[last]);
    conv(l, c[last], 2 * a->latent_channels, 3);
}

static void decoder(list *l) {
    const vm_arch *a = l->arch;
    const size_t *c = vm_arch_widths(a, VM_DECODE), last = a->levels - 1;
    conv(l, a->latent_channels, c[last], 3);
    if (!l->diffusers) mid(l, c[last]);
    for (size_t i = 0; i < a->levels; i++) { /* diffusers numbers the levels by order of use, the others by size */
        const size_t here = l->diffusers ? last - i : i;
        level(l, c[here < last ? here + 1 : last], c[here], a->layers_per_block + 1, here > 0);
    }
    if (l->diffusers) mid(l, c[last]);
    norm(l, c[0]);
    conv(l, c[0], a->out_channels, 3);
}

vm_status vm_trace_vae_weights(const vm_arch *arch, vm_trace_runtime runtime, vm_dtype dtype, vm_trace **out) {
    *out = NULL;
    vm_status s = vm_arch_check(arch);
    if (!s) s = vm_trace_new(out);
    if (s) return s;
    list l = {.t = *out, .arch = arch, .element = vm_dtype_bytes(dtype), .diffusers = runtime == VM_TORCH_DIFFUSERS};
    encoder(&l);
    decoder(&l);
    if (arch->use_quant_conv) conv(&l, 2 * arch->latent_channels, 2 * arch->latent_channels, 1);
    if (arch->use_post_quant_conv) conv(&l, arch->latent_channels, arch->latent_channels, 1);
    if (arch->patch_size[0])
        batch_norm(&l, VM_PRODUCT(arch->patch_size[0], arch->patch_size[1], arch->latent_channels));
    if (l.status) {
        vm_trace_free(*out);
        *out = NULL;
    }
    return l.status;
}
