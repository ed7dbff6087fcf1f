/* The attention block between the two middle resnets, following each runtime's forward.
 *
 * Sources: diffusers' AttnProcessor2_0; AttnBlock of BFL's autoencoder.py, of CompVis' ldm/modules/diffusionmodules/
 * model.py and of ComfyUI's file of that name (pytorch_attention); cross_attention_attnblock_forward of A1111's
 * modules/sd_hijack_optimizations.py. */
#include "walk.h"

tensor vm_walk_attend(walk *w, const tensor *x, int dims, path name) {
    const uint64_t tokens = VM_PRODUCT64(x->h, x->w);
    const vm_heads heads = {.dims = dims, .batch = x->n, .heads = 1, .length = tokens, .depth = x->c};
    const vm_sdpa call = {.dtype = w->dtype, .q = heads, .k = heads, .v = heads};
    tensor y = *x;
    y.bytes = VM_PRODUCT64(x->n, x->c, tokens, element(w));
    if (!w->status) w->status = vm_trace_attention(w->t, &call, VM_ATTENTION_USUAL, &w->vae->gpu, name.text, &y.id);
    if (!w->status) w->live += y.bytes;
    return y;
}

/* A view of (N, H*W, C) as (N, C, H, W): with one image the batch's stride collapses. */
layout vm_walk_seen(const tensor *x) {
    return x->c == 1 || x->h * x->w == 1 ? CONTIGUOUS : x->n == 1 ? CHANNELS_LAST_ONE : CHANNELS_LAST;
}

tensor vm_walk_attention_diffusers(walk *w, const tensor *x, path name) {
    const path out = at(name, ".to_out.0");
    const path linear[3] = {at(name, ".to_q"), at(name, ".to_k"), at(name, ".to_v")};
    const tensor normed = norm(w, x, at(name, ".group_norm"));
    /* Linear layers on a transposed input: a product, then the bias is added in place. An input of one pixel counts as
     * dense; its product adds the bias itself. Several images are copied for one product, because the weights could
     * have gradients (should_fold in LinearAlgebra.cpp). */
    const vm_trace_op product_op = x->h * x->w > 1 ? VM_TRACE_CUBLAS : VM_TRACE_CUBLASLT;
    const bool copies = x->n > 1 && x->c > 1 && x->h * x->w > 1;
    const uint64_t rows = VM_PRODUCT64(x->n, x->h, x->w), c = x->c;
    tensor qkv[3];
    for (int i = 0; i < 3; i++) {
        begin(w, linear[i]);
        const tensor copy = copies ? take_like(w, &normed, linear[i]) : normed;
        qkv[i] = take_like(w, &normed, linear[i]);
        blas(w, product_op, rows, c, c, linear[i]);
        give_copy(w, &copy, &normed);
        end(w, linear[i]);
    }
    tensor h = vm_walk_attend(w, x, 4, name);
    begin(w, out);
    const tensor projected = take_like(w, &normed, out);
    blas(w, VM_TRACE_CUBLASLT, rows, c, c, at(out, " [workspace]"));
    end(w, out);
    bind(w, &h, projected);
    const layout layout = x->layout == CHANNELS_LAST ? CHANNELS_LAST : vm_walk_seen(x);
    tensor y = take(w, x->n, x->c, x->h, x->w, layout, at(name, " [sum]"));
    give(w, &h);
    bind(w, &y, take_like(w, &y, name)); /* / rescale_output_factor */
    give(w, &normed);
    for (int i = 0; i < 3; i++) give(w, &qkv[i]);
    return y;
}

/* The blocks of LDM's descendants: norm, q, k, v, proj_out; all are 1x1 convolutions. */
typedef struct heads {
    tensor normed, qkv[3];
} heads;

static heads project_normed(walk *w, tensor normed, path name) {
    heads a = {.normed = normed};
    for (int i = 0; i < 3; i++) a.qkv[i] = conv1(w, &normed, normed.c, at(name, ".%c", "qkv"[i]));
    return a;
}

static heads project(walk *w, const tensor *x, path name) {
    return project_normed(w, norm(w, x, at(name, ".norm")), name);
}

static void give_qkv(walk *w, const heads *a) {
    for (int i = 0; i < 3; i++) give(w, &a->qkv[i]);
}

/* Makes (N, 1, H*W, C) contiguous: new tensors, or the same. */
static tensor transposed(walk *w, const tensor *x, path name) { return dense(w, x, true, name); }

tensor vm_walk_attention_bfl(walk *w, const tensor *x, path name) {
    heads a = project(w, x, name);
    for (int i = 0; i < 3; i++) {
        const tensor dense = transposed(w, &a.qkv[i], at(name, ".%c", "qkv"[i]));
        give_copy(w, &a.qkv[i], &dense);
        a.qkv[i] = dense;
    }
    tensor h = vm_walk_attend(w, x, 4, name);
    give(w, &a.normed);
    give_qkv(w, &a);
    h.layout = h.c > 1 ? CHANNELS_LAST : CONTIGUOUS; /* a permutation of (N, H, W, C) */
    bind(w, &h, conv1(w, &h, h.c, at(name, ".proj_out")));
    const tensor y = take_like(w, x, name);
    give(w, &h);
    return y;
}

tensor vm_walk_attention_comfyui(walk *w, const tensor *x, path name) {
    const heads a = project(w, x, name);
    tensor dense[3];
    for (int i = 0; i < 3; i++) dense[i] = transposed(w, &a.qkv[i], at(name, ".%c", "qkv"[i]));
    tensor h = vm_walk_attend(w, x, 4, name);
    for (int i = 0; i < 3; i++) give_copy(w, &dense[i], &a.qkv[i]);
    give(w, &a.normed);
    h.layout = vm_walk_seen(x);
    bind(w, &h, conv1(w, &h, h.c, at(name, ".proj_out")));
    const tensor y = take_like(w, x, name);
    give(w, &h);
    give_qkv(w, &a);
    return y;
}

/* softmax(scale * q k^T) for some of the queries, row by row of scores. */
static tensor scores(walk *w, const tensor *x, uint64_t queries, path name) {
    const path of = at(name, " [scores]");
    const uint64_t keys = VM_PRODUCT64(x->h, x->w);
    tensor s = take(w, x->n, 1, queries, keys, CONTIGUOUS, of);
    blas(w, VM_TRACE_CUBLAS, VM_PRODUCT64(x->n, queries), x->c, keys, of);
    bind(w, &s, take_like(w, &s, at(name, " [scores, scaled]")));
    bind(w, &s, take_like(w, &s, at(name, " [softmax]")));
    return s;
}

/* Returns: the number of parts into which A1111 splits the queries: a power of two for which 2.5 times a part's scores
 * fit into free memory. 1 if no such number divides them, or if no memory is free (PyTorch has raised then). */
static uint64_t parts(const walk *w, const tensor *x) {
    const uint64_t tokens = VM_PRODUCT64(x->h, x->w), free = w->vae->gpu.free_bytes;
    const double wanted = 2.5 * (double)VM_PRODUCT64(x->n, tokens, tokens, element(w));
    uint64_t n = 1;
    while (free > w->live && n < tokens && wanted > (double)(free - w->live) * (double)n) n *= 2;
    return tokens % n ? 1 : n;
}

/* drops: the block's name for its normalised input is bound to the result's zeros. */
static tensor attend_in_parts(walk *w, const heads *a, bool drops, path name) {
    const path attended = at(name, " [attention]");
    const tensor *x = &a->normed;
    tensor h = take_like(w, &a->qkv[1], attended); /* zeros, shaped like the keys */
    if (drops) give(w, x);
    const uint64_t n = parts(w, x), tokens = VM_PRODUCT64(x->h, x->w), queries = tokens / n;
    for (uint64_t i = 0; !w->status && i < n; i++) {
        const tensor weights = scores(w, x, queries, name);
        const tensor part = take(w, x->n, x->c, 1, queries, CONTIGUOUS, at(name, " [part]"));
        blas(w, VM_TRACE_CUBLAS, VM_PRODUCT64(x->n, queries), tokens, x->c, attended);
        give(w, &part);
        give(w, &weights);
    }
    bind(w, &h, conv1(w, &h, x->c, at(name, ".proj_out"))); /* the block's input is added in place */
    give_qkv(w, a);
    return h;
}

tensor vm_walk_attention_a1111(walk *w, const tensor *x, path name) {
    const heads a = project(w, x, name);
    return attend_in_parts(w, &a, true, name);
}

tensor vm_walk_attention_of_tile(walk *w, const tensor *normed, path name) {
    const heads a = project_normed(w, *normed, name);
    return attend_in_parts(w, &a, false, name);
}
