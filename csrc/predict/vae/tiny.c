/* diffusers' AutoencoderTiny: modules of one Sequential. Each drops the previous module's input; the first one's input
 * is held to the end.
 *
 *   block    (TAEF2's: x + 1x1 relu norm 1x1) | conv relu conv relu conv | add | relu
 *   encode   (x + 1) / 2 | conv | levels: strided conv, blocks | conv
 *   decode   tanh(x / 3) * 3 | conv relu | levels: blocks, nearest 2x, conv | x * 2 - 1
 *
 * TAEF2's branch follows taesd.py (madebyollin/taesd): diffusers' class has none.
 *
 * Tiles are blended in float32 into a whole output of that type. Names hold the last tile and its masks. */
#include "walk.h"

static void relu(walk *w, tensor *x, path name) { bind(w, x, take_like(w, x, at(name, " [relu]"))); }

/* The result of an operator that reads twice as many numbers as it writes. */
static tensor add(walk *w, const tensor *like, path name) {
    const tensor y = take_like(w, like, name);
    vm_trace_move(w->t, y.bytes);
    return y;
}

static tensor block(walk *w, const tensor *x, bool pools, path name) {
    tensor in = *x;
    if (pools) {
        const path pool = at(name, ".pool");
        tensor h = conv1(w, x, 4 * x->c, at(pool, ".0"));
        bind(w, &h, norm(w, &h, at(pool, ".1")));
        vm_trace_move(w->t, 2 * h.bytes); /* activated in place */
        bind(w, &h, conv1(w, &h, x->c, at(pool, ".3")));
        in = add(w, x, at(pool, " [sum]"));
        give(w, &h);
    }
    tensor h = conv3(w, &in, x->c, at(name, ".conv.0"));
    for (int i = 1; i < 3; i++) {
        relu(w, &h, at(name, ".conv.%d", 2 * i - 1));
        bind(w, &h, conv3(w, &h, x->c, at(name, ".conv.%d", 2 * i)));
    }
    bind(w, &h, add(w, &h, at(name, " [sum]")));
    relu(w, &h, name);
    give_copy(w, &in, x);
    return h;
}

static tensor upsample(walk *w, const tensor *x, path name) {
    return take(w, x->n, x->c, 2 * x->h, 2 * x->w, x->layout, at(name, " [nearest 2x]"));
}

/* Two elementwise operators; the first one's result is freed after the second. */
static tensor scale(walk *w, const tensor *x, const char *first, const char *second) {
    tensor y = take_like(w, x, at((path){""}, "%s", first));
    bind(w, &y, take_like(w, &y, at((path){""}, "%s", second)));
    return y;
}

tensor vm_walk_tiny(walk *w, const tensor *x) {
    const vm_arch *a = w->vae->arch;
    const bool decodes = w->vae->op == VM_DECODE;
    const path name = at((path){""}, "%s.layers", decodes ? "decoder" : "encoder");
    const size_t c = vm_arch_widths(a, w->vae->op)[0], last = a->levels - 1;
    tensor in =
        decodes ? scale(w, x, "decoder [x / 3]", "decoder [tanh]") : scale(w, x, "encoder [x + 1]", "encoder [/ 2]");
    if (decodes) bind(w, &in, take_like(w, &in, (path){"decoder [* 3]"}));
    tensor h = conv3(w, &in, c, at(name, ".0"));
    if (decodes) relu(w, &h, at(name, ".1"));
    size_t number = decodes ? 2 : 1;
    for (size_t i = 0; i <= last; i++) {
        const size_t level = decodes ? last - i : i;
        if (!decodes && i) bind(w, &h, conv(w, &h, c, 3, 2, 1, at(name, ".%zu", number++)));
        for (size_t j = 0; j < (level ? a->layers_per_block : 1); j++)
            bind(w, &h, block(w, &h, a->norm_num_groups && level == last, at(name, ".%zu", number++)));
        if (!decodes || i == last) continue;
        bind(w, &h, upsample(w, &h, at(name, ".%zu", number++)));
        bind(w, &h, conv3(w, &h, c, at(name, ".%zu", number++)));
    }
    bind(w, &h, conv3(w, &h, decodes ? a->out_channels : a->latent_channels, at(name, ".%zu", number)));
    give(w, &in);
    if (decodes) bind(w, &h, scale(w, &h, "decoder [* 2]", "decoder [- 1]"));
    return h;
}

tensor vm_walk_tiny_tiles(walk *w, const tensor *x, uint64_t in, uint64_t out, uint64_t step) {
    enum { FLOAT = 4 };
    const bool decodes = w->vae->op == VM_DECODE;
    const uint64_t factor = vm_arch_factor(w->vae->arch);
    const uint64_t c = decodes ? w->vae->arch->out_channels : w->vae->arch->latent_channels;
    const uint64_t high = decodes ? x->h * factor : x->h / factor, wide = decodes ? x->w * factor : x->w / factor;
    const tensor none = {.id = EXTERNAL};
    const path masks = {"tile [masks]"}, blending = {"blend"};
    const tensor whole[2] = {take_sized(w, 1, 2, out, out, CONTIGUOUS, FLOAT, masks),
                             take_sized(w, x->n, c, high, wide, CONTIGUOUS, FLOAT, (path){"result [float]"})};
    tensor tile = none, mask[3] = {none, none, none}; /* masks: rows, columns, and their product */
    for (uint64_t top = 0; top < x->h; top += step) {
        for (uint64_t left = 0; !w->status && left < x->w; left += step) {
            tensor part = *x;
            part.h = VM_MIN(in, x->h - top);
            part.w = VM_MIN(in, x->w - left);
            part.slice = true;
            bind(w, &tile, vm_walk_tiny(w, &part));
            for (int k = 0; k < 3; k++) {
                const bool is_view = k < 2 && (k ? left : top);
                bind(w, &mask[k], is_view ? none : take_sized(w, 1, 1, out, out, CONTIGUOUS, FLOAT, masks));
            }
            const tensor new = take_sized(w, tile.n, tile.c, tile.h, tile.w, CONTIGUOUS, FLOAT, blending);
            const tensor rest = take_sized(w, 1, 1, tile.h, tile.w, CONTIGUOUS, FLOAT, blending);
            const tensor old = take_sized(w, tile.n, tile.c, tile.h, tile.w, CONTIGUOUS, FLOAT, blending);
            give(w, &rest);
            const tensor sum = take_sized(w, tile.n, tile.c, tile.h, tile.w, CONTIGUOUS, FLOAT, blending);
            vm_trace_move(w->t, 3 * sum.bytes); /* the sum reads two tensors, and is copied */
            give(w, &new);
            give(w, &old);
            give(w, &sum);
        }
    }
    give(w, &tile);
    for (int k = 0; k < 3; k++) give(w, &mask[k]);
    give(w, &whole[0]);
    return whole[1];
}
