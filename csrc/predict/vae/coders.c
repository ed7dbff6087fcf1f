/* The blocks of AutoencoderKL's encoder and decoder (halves.c) in six runtimes: diffusers' AutoencoderKL (0.33 to
 * 0.42); the AutoEncoder of BFL's flux repository, as in InvokeAI; CompVis' AutoencoderKL
 * (ldm/modules/diffusionmodules/model.py of stable-diffusion); ComfyUI's file of that name (comfy/ldm, since v0.3.77);
 * CompVis' as A1111 changes it (modules/sd_hijack*.py); and Forge's (backend/nn/vae.py), which equals ComfyUI's before
 * 2025.
 *
 * They compute the same, but tensors live for different times. A Python name (or a caller's, or the encoder's list)
 * holds a tensor until it is bound again or its function returns. A statement such as h = norm(h) briefly holds both.
 *
 *              resnet: norm1 silu conv1 norm2 silu conv2 (1x1 shortcut) add (diffusers: and a division by 1)
 *   encode     conv_in | levels: resnets, pad + strided conv | mid: resnet attention resnet | norm silu conv_out | 1x1
 *   decode     1x1 | conv_in | mid | levels: resnets, nearest 2x + conv | norm silu conv_out */
#include "walk.h"

const char *const vm_trace_runtime_name[VM_TORCH_RUNTIMES] = {
    [VM_TORCH_DIFFUSERS] = "diffusers", [VM_TORCH_BFL] = "bfl",     [VM_TORCH_COMFYUI] = "comfyui",
    [VM_TORCH_A1111] = "a1111",         [VM_TORCH_FORGE] = "forge",
};

const frames vm_walk_frames[VM_TORCH_RUNTIMES] = {
    [VM_TORCH_DIFFUSERS] = {.diffusers = true, .attention = vm_walk_attention_diffusers},
    [VM_TORCH_BFL] = {.lists = true, .attention = vm_walk_attention_bfl, .quant = QUANT_NONE},
    [VM_TORCH_COMFYUI] = {.rolls = true,
                          .packs = true,
                          .resnet = SILU_IN_PLACE,
                          .attention = vm_walk_attention_comfyui,
                          .quant = QUANT_EVEN},
    [VM_TORCH_A1111] = {.lists = true, .attention = vm_walk_attention_a1111, .quant = QUANT_BOTH},
    [VM_TORCH_FORGE] = {.draws = true,
                        .resnet = SILU_IN_PLACE,
                        .last = SIGMOID_PRODUCT,
                        .attention = vm_walk_attention_comfyui,
                        .quant = QUANT_EVEN},
};

/* ---- blocks ---- */

/* h = nonlinearity(h) */
static void activate(walk *w, tensor *h, activation how, path name) {
    if (how == SILU_IN_PLACE) {
        vm_trace_move(w->t, 2 * h->bytes);
        return;
    }
    if (how == SILU) {
        bind(w, h, take_like(w, h, at(name, " [silu]")));
        return;
    }
    const tensor gate = take_like(w, h, at(name, " [sigmoid]")), product = take_like(w, h, at(name, " [x * sigmoid]"));
    vm_trace_move(w->t, product.bytes); /* reads two tensors */
    give(w, &gate);
    bind(w, h, product);
}

/* Up to this release, diffusers copies the input of a shortcut that is not contiguous. */
enum { CONTIGUOUS_SHORTCUT = 36 };

static tensor resnet(walk *w, frame *f, const tensor *x, uint64_t c, path name) {
    (void)f;
    const path norm1 = at(name, ".norm1"), norm2 = at(name, ".norm2");
    tensor h = norm(w, x, norm1);
    activate(w, &h, w->frames->resnet, norm1);
    bind(w, &h, conv3(w, &h, c, at(name, ".conv1")));
    bind(w, &h, norm(w, &h, norm2));
    activate(w, &h, w->frames->resnet, norm2);
    bind(w, &h, conv3(w, &h, c, at(name, ".conv2")));
    tensor skip = *x;
    if (x->c != c) {
        const path shortcut = at(name, ".%s", vm_walk_names(w->vae->arch, w->vae->runtime)->in_resnet[4]);
        const bool copies = w->frames->diffusers && w->vae->release <= CONTIGUOUS_SHORTCUT;
        const tensor in = copies ? contiguous(w, x, shortcut) : *x;
        skip = conv1(w, &in, c, shortcut);
        give_copy(w, &in, x);
    }
    tensor y = take_like(w, &skip, at(name, " [sum]"));
    vm_trace_move(w->t, y.bytes);                                  /* reads two tensors */
    if (w->frames->diffusers) bind(w, &y, take_like(w, &y, name)); /* / output_scale_factor */
    give_copy(w, &skip, x);
    give(w, &h);
    return y;
}

tensor vm_walk_downsample(walk *w, const tensor *x, path name) {
    const tensor padded = take(w, x->n, x->c, x->h + 1, x->w + 1, x->layout, at(name, " [pad]"));
    const tensor y = conv(w, &padded, x->c, 3, 2, 0, name);
    give(w, &padded);
    return y;
}

/* diffusers keeps large tensors from PyTorch's channels_last kernel (pytorch#141831). */
static bool too_large_for_nhwc(const tensor *x) {
    return x->n >= 64 || VM_PRODUCT64(2, x->n, x->c, x->h, x->w) > (uint64_t)1 << 31;
}

tensor vm_walk_upsample(walk *w, const tensor *x, path name) {
    const tensor in = w->frames->diffusers && too_large_for_nhwc(x) ? contiguous(w, x, name) : *x;
    const layout layout = in.layout == CHANNELS_LAST ? CHANNELS_LAST : CONTIGUOUS;
    const tensor wide = take(w, x->n, x->c, 2 * x->h, 2 * x->w, layout, at(name, " [nearest 2x]"));
    give_copy(w, &in, x);
    const tensor y = conv3(w, &wide, x->c, name);
    give(w, &wide);
    return y;
}

/* ---- encoder and decoder ---- */

static tensor conv_at_end(walk *w, frame *f, const tensor *x, uint64_t c, path name) {
    (void)f;
    return conv3(w, x, c, name);
}

static tensor attention(walk *w, const tensor *x, path name) { return w->frames->attention(w, x, name); }

static tensor resample(walk *w, frame *f, const tensor *x, const part *p) {
    (void)f;
    return (w->vae->op == VM_DECODE ? vm_walk_upsample : vm_walk_downsample)(w, x, at(p->name, ".conv"));
}

static void activate_last(walk *w, tensor *x, path name) { activate(w, x, w->frames->last, name); }

tensor vm_walk_coder(walk *w, const tensor *x) {
    static const blocks own = {conv_at_end, resnet, attention, resample, norm, activate_last};
    return vm_walk_half(w, NULL, &own, x);
}
