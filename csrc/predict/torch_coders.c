/* Encoder and decoder of a VAE as six runtimes hold them: diffusers' AutoencoderKL (0.33); the AutoEncoder of BFL's
 * flux repository, as InvokeAI carries it; CompVis' AutoencoderKL (ldm/modules/diffusionmodules/model.py of
 * stable-diffusion); ComfyUI's file of that name (comfy/ldm, since v0.3.77); CompVis' as A1111 changes it
 * (modules/sd_hijack*.py); and Forge's (backend/nn/vae.py), which is as ComfyUI's was before 2025.
 *
 * They compute the same. What differs is how long tensors live: a Python name (or a caller's, or the encoder's list)
 * holds a tensor until it is bound again or its function returns, and a statement such as h = norm(h) holds both for a
 * moment.
 *
 *              resnet: norm1 silu conv1 norm2 silu conv2 (1x1 shortcut) add (diffusers: and a division by 1)
 *   encode     conv_in | levels: resnets, pad + strided conv | mid: resnet attention resnet | norm silu conv_out | 1x1
 *   decode     1x1 | conv_in | mid | levels: resnets, nearest 2x + conv | norm silu conv_out */
#include "torch_walk.h"

const frames vm_walk_frames[VM_TORCH_RUNTIMES] = {
    [VM_TORCH_DIFFUSERS] = {.diffusers = true, .attention = vm_walk_attention_diffusers},
    [VM_TORCH_BFL] = {.lists = true, .attention = vm_walk_attention_bfl, .quant = QUANT_NONE},
    [VM_TORCH_LDM] = {.lists = true,
                      .resnet = SIGMOID_PRODUCT,
                      .last = SIGMOID_PRODUCT,
                      .attention = vm_walk_attention_ldm,
                      .quant = QUANT_BOTH},
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
    vm_trace_move(w->t, product.bytes); /* which reads two */
    give(w, &gate);
    bind(w, h, product);
}

static tensor resnet(walk *w, const tensor *x, size_t c, path name) {
    const path norm1 = at(name, ".norm1"), norm2 = at(name, ".norm2");
    tensor h = norm(w, x, norm1);
    activate(w, &h, w->frames->resnet, norm1);
    bind(w, &h, conv3(w, &h, c, at(name, ".conv1")));
    bind(w, &h, norm(w, &h, norm2));
    activate(w, &h, w->frames->resnet, norm2);
    bind(w, &h, conv3(w, &h, c, at(name, ".conv2")));
    tensor skip = *x;
    if (x->c != c) {
        const path shortcut = at(name, w->frames->diffusers ? ".conv_shortcut" : ".nin_shortcut");
        const tensor in = w->frames->diffusers ? contiguous(w, x, shortcut) : *x;
        skip = conv1(w, &in, c, shortcut);
        give_copy(w, &in, x);
    }
    tensor y = take_like(w, &skip, at(name, " [sum]"));
    vm_trace_move(w->t, y.bytes);                                  /* which reads two */
    if (w->frames->diffusers) bind(w, &y, take_like(w, &y, name)); /* / output_scale_factor */
    give_copy(w, &skip, x);
    give(w, &h);
    return y;
}

/* drops: nobody else names x, so it goes as soon as the first resnet is done. */
static tensor mid(walk *w, const tensor *x, bool drops, path name) {
    const bool d = w->frames->diffusers;
    const path attention = at(name, d ? "mid_block.attentions.0" : "mid.attn_1");
    tensor h = resnet(w, x, x->c, at(name, d ? "mid_block.resnets.0" : "mid.block_1"));
    if (drops) give(w, x);
    if (w->vae->arch->mid_block_add_attention) bind(w, &h, w->frames->attention(w, &h, attention));
    bind(w, &h, resnet(w, &h, x->c, at(name, d ? "mid_block.resnets.1" : "mid.block_2")));
    return h;
}

/* norm, silu, conv_out of *x, which is bound to the result. */
static void finish(walk *w, tensor *x, size_t c, path name) {
    const path normed = at(name, w->frames->diffusers ? "conv_norm_out" : "norm_out");
    bind(w, x, norm(w, x, normed));
    activate(w, x, w->frames->last, normed);
    bind(w, x, conv3(w, x, c, at(name, "conv_out")));
}

tensor vm_walk_downsample(walk *w, const tensor *x, path name) {
    const tensor padded = take(w, x->n, x->c, x->h + 1, x->w + 1, x->layout, at(name, " [pad]"));
    const tensor y = conv(w, &padded, x->c, 3, 2, 0, name);
    give(w, &padded);
    return y;
}

/* diffusers keeps large tensors from PyTorch's channels_last kernel (pytorch#141831). */
static bool too_large_for_nhwc(const tensor *x) {
    return x->n >= 64 || VM_PRODUCT(2, x->n, x->c, x->h, x->w) > (size_t)1 << 31;
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

/* way: "down" or "up". */
static path block_name(const walk *w, path half, const char *way, size_t level, size_t block, bool resamples) {
    const path top = at(half, w->frames->diffusers ? "%s_blocks.%zu" : "%s.%zu", way, level);
    if (resamples) return at(top, w->frames->diffusers ? ".%ssamplers.0.conv" : ".%ssample.conv", way);
    return at(top, w->frames->diffusers ? ".resnets.%zu" : ".block.%zu", block);
}

enum { MOST_KEPT = VM_MAX_LEVELS * (VM_MAX_LAYERS + 1) + 1 };

tensor vm_walk_encoder(walk *w, const tensor *image) {
    const vm_arch *a = w->vae->arch;
    const size_t *width = vm_arch_widths(a, VM_ENCODE);
    const bool d = w->frames->diffusers, lists = w->frames->lists;
    const path name = {"encoder."};
    tensor h = conv3(w, image, width[0], at(name, "conv_in"));
    tensor kept[MOST_KEPT]; /* the list; diffusers: the caller's name holds the input of a level, or of mid */
    size_t keeps = 0;
    for (size_t level = 0; level < a->levels; level++) {
        const tensor held = h;
        for (size_t i = 0; i < a->layers_per_block + (level + 1 < a->levels); i++) {
            const bool down = i == a->layers_per_block;
            const path block = block_name(w, name, "down", level, i, down);
            const tensor y = down ? vm_walk_downsample(w, &h, block) : resnet(w, &h, width[level], block);
            if (lists)
                kept[keeps++] = h;
            else if (!d || h.id != held.id)
                give(w, &h);
            h = y;
        }
        if (d) give(w, &held);
    }
    if (d || lists || w->frames->rolls) kept[keeps++] = h;
    h = mid(w, &h, !keeps, name);
    if (d) give(w, &kept[--keeps]);
    finish(w, &h, 2 * a->latent_channels, name);
    for (size_t i = 0; i < keeps; i++) give(w, &kept[i]);
    return h;
}

tensor vm_walk_decoder(walk *w, const tensor *z) {
    const vm_arch *a = w->vae->arch;
    const size_t *width = vm_arch_widths(a, VM_DECODE);
    const path name = {"decoder."};
    const bool d = w->frames->diffusers, rolls = w->frames->rolls;
    tensor h = conv3(w, z, width[a->levels - 1], at(name, "conv_in")), held = h;
    h = mid(w, &h, !d, name);
    if (d) give(w, &held); /* by the caller's name, here and below */
    if (w->dtype != w->vae->dtype) {
        w->dtype = w->vae->dtype;
        bind(w, &h, take_like(w, &h, at((path){"decoder"}, " [to %s]", vm_dtype_name(w->dtype))));
    }
    for (size_t i = 0; i < a->levels; i++) {
        const size_t level = a->levels - 1 - i; /* diffusers numbers by order, the others by size */
        if (d || !i) held = h;
        for (size_t j = 0; j < a->layers_per_block + 1 + (level > 0); j++) {
            const bool up = j == a->layers_per_block + 1;
            const path block = block_name(w, name, "up", d ? i : level, j, up);
            const tensor y = up ? vm_walk_upsample(w, &h, block) : resnet(w, &h, width[level], block);
            if (!(d || rolls) || h.id != held.id) give(w, &h);
            h = y;
        }
        if (d) give(w, &held);
    }
    finish(w, &h, a->out_channels, name);
    if (rolls) give(w, &held);
    return h;
}
