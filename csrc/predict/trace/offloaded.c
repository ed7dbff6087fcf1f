/* Weights and other tensors that are on the device only while some modules are called. */
#include <stdio.h>
#include <string.h>

#include "../modules/program.h"

vm_status vm_passage_new(vm_trace *t, const vm_passings *of, vm_passage *p) {
    *p = (vm_passage){.t = t, .of = of};
    return vm_scratch_new(of->count + 1, sizeof *p->there, &p->there);
}

void vm_passage_free(vm_passage *p) { vm_scratch_free(p->there); }

/* Returns: the first of the tensors that come with a module. */
static size_t first_with(const vm_passings *of, const char *module) {
    size_t low = 0, high = of->count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (strcmp(of->item[middle].module, module) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static vm_status come(vm_passage *p, const vm_passing *one, const char *shown, uint64_t product) {
    const uint64_t bytes = one->bytes + (one->row_flops ? product / one->row_flops * one->row_bytes : 0);
    char label[16 + VM_PROGRAM_PATH], text[VM_TRACE_LABEL];
    uint32_t id;
    if (p->count == p->of->count)
        return vm_fail(VM_EINVAL, VM_EXPECTED("passing", "modules whose calls begin and end in turn", "%s"),
                       one->until);
    /* A trace keeps the ends of names; the front says that these are weights. */
    const char *const what = one->early ? "" : one->name;
    if (one->early) shown = one->name;
    const size_t length = strlen(shown), most = VM_NAME - 1 - 11 - (*what ? strlen(what) + 3 : 0);
    if (one->by == VM_BY_DIFFUSERS && length > most) shown += length - most;
    snprintf(label, sizeof label, "%s%.*s", one->row_bytes ? "" : "weights of ", VM_PROGRAM_PATH, shown);
    vm_status s;
    if ((s = vm_trace_take_on(p->t, one->stream, bytes, vm_trace_label(text, label, what), &id))) return s;
    if (one->by != VM_BY_NONE && (s = vm_trace_send(p->t, bytes, one->by == VM_BY_ACCELERATE))) return s;
    p->there[p->count++] = (vm_there){id, one};
    return VM_OK;
}

/* Gives the tensors from number `first` on that leave once `now` is there. */
static vm_status leave(vm_passage *p, size_t first, const vm_passing *now) {
    vm_status s = VM_OK;
    size_t kept = first;
    for (size_t i = first; !s && i < p->count; i++) {
        const vm_there one = p->there[i];
        if (one.of->lives && one.of + one.of->lives == now)
            s = vm_trace_give(p->t, one.id);
        else
            p->there[kept++] = one;
    }
    if (!s) p->count = kept;
    return s;
}

vm_status vm_passage_begin(vm_passage *p, const char *module, const char *shown, uint64_t product) {
    const vm_passings *of = p->of;
    const size_t first = p->count;
    vm_status s;
    for (size_t i = first_with(of, module); i < of->count && !strcmp(of->item[i].module, module); i++) {
        if ((s = come(p, &of->item[i], shown, product))) return s;
        if ((s = leave(p, first, &of->item[i]))) return s;
    }
    return VM_OK;
}

vm_status vm_passage_end(vm_passage *p, const char *module) {
    vm_status s = VM_OK;
    size_t kept = 0;
    for (size_t i = p->count; !s && !p->in_order && i-- > 0;)
        if (!strcmp(p->there[i].of->until, module)) s = vm_trace_give(p->t, p->there[i].id);
    for (size_t i = 0; !s && i < p->count; i++) {
        const vm_there one = p->there[i];
        if (strcmp(one.of->until, module))
            p->there[kept++] = one;
        else if (p->in_order)
            s = vm_trace_give(p->t, one.id);
    }
    if (!s) p->count = kept;
    return s;
}

/* ---- low-rank pairs ---- */

/* Multiplies by one of a pair. */
static vm_status multiply(const vm_companion *of, vm_passage *p, const char *half, uint64_t bytes, uint64_t flops,
                          const vm_conv *conv, uint32_t *id) {
    char path[VM_PROGRAM_PATH + 8], text[VM_TRACE_LABEL];
    snprintf(path, sizeof path, "%s.%s", of->module, half);
    vm_status s;
    if ((s = vm_passage_begin(p, path, path, 0))) return s;
    if ((s = vm_trace_take(p->t, bytes, path, id))) return s;
    if (conv) {
        s = vm_trace_conv(p->t, conv, vm_trace_label(text, path, "workspace"));
    } else {
        vm_trace_count(p->t, flops);
        s = vm_trace_blas(p->t, VM_TRACE_CUBLAS, path);
    }
    return s ? s : vm_passage_end(p, path);
}

static int64_t out_along(const vm_conv *c, int d) {
    return (c->size[d] + 2 * c->padding[d] - c->filter[d]) / c->stride[d] + 1;
}

vm_status vm_companion_play(const vm_companion *of, vm_passage *p, uint64_t bytes, uint64_t flops, const vm_conv *conv,
                            uint32_t *id) {
    const uint64_t inner = bytes / of->rows * of->rank;
    uint32_t a, b, scaled, sum;
    vm_conv first, second;
    if (conv) {
        const int64_t x[] = {conv->n, (int64_t)of->rank, out_along(conv, 1), out_along(conv, 2)};
        first = *conv;
        first.k = (int64_t)of->rank;
        second = vm_conv_square(conv->dtype, x, conv->k, 1, 1, 0);
        second.tf32 = conv->tf32, second.nhwc = conv->nhwc;
    }
    vm_status s;
    if ((s = multiply(of, p, "lora_A", inner, flops / of->rows * of->rank, conv ? &first : NULL, &a))) return s;
    if ((s = multiply(of, p, "lora_B", bytes, flops / of->columns * of->rank, conv ? &second : NULL, &b))) return s;
    if ((s = vm_trace_give(p->t, a))) return s;
    if ((s = vm_trace_take(p->t, bytes, of->module, &scaled))) return s;
    if ((s = vm_trace_give(p->t, b))) return s;
    if ((s = vm_trace_take(p->t, bytes, of->module, &sum))) return s;
    if ((s = vm_trace_give(p->t, *id))) return s;
    if ((s = vm_trace_give(p->t, scaled))) return s;
    *id = sum;
    return VM_OK;
}
