/* The model object and its weights: one packed copy, in the order in which the passes ask for it.
 *
 *   convolution, linear   [out/16][in/16][taps][min(16, in)][16 out]   (zero where out or in end)
 *   vector                [c/16][16]
 *
 * Tensors lie end to end, so the three projections of an attention are one convolution with three
 * times the channels. Packing only moves numbers: get returns bit for bit what set was given. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "vm.h"

int vm_weights_add(vm_model *m, const char *name, size_t dims, const vm_weight *w) {
    if (vm_mem_grow(m->host, VM_WEIGHTS, (void **)&m->tensor, m->tensors, sizeof *m->tensor)) return VM_NONE;
    vm_tensor *t = &m->tensor[m->tensors];
    snprintf(t->name, sizeof t->name, "%s", name);
    t->dims = dims;
    t->shape[0] = w->out;
    t->shape[1] = w->in;
    t->shape[2] = t->shape[3] = w->ksize;
    t->weight = *w;
    t->taps = w->ksize * w->ksize;
    t->depth = VM_MIN(w->in, VM_BLOCK);
    t->offset = m->weights_bytes;
    t->bytes = m->backend ? m->backend->device->weight_bytes(m->backend, w)
                          : VM_BLOCKS(w->out) * VM_BLOCK * VM_BLOCKS(w->in) * t->taps * t->depth * sizeof(float);
    m->weights_bytes += t->bytes;
    return (int)m->tensors++;
}

const vm_tensor *vm_weights_find(const vm_model *m, const char *name) {
    for (size_t i = 0; i < m->tensors; i++)
        if (!strcmp(m->tensor[i].name, name)) return &m->tensor[i];
    return NULL;
}

static float from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    /* a float with the same bits 13 places up has an exponent 112 too small: exact to put right, subnormals too */
    return from_bits(sign | magnitude << 13) * 0x1p112f;
}

static float element(vm_dtype dtype, const void *data, size_t i) {
    switch (dtype) {
    case VM_F16:
        return half_to_float(((const uint16_t *)data)[i]);
    case VM_BF16:
        return from_bits((uint32_t)((const uint16_t *)data)[i] << 16);
    default:
        return ((const float *)data)[i];
    }
}

/* Where element (o, i, tap) of the file's layout lies in the packed copy of a CPU. */
static float *packed_at(const vm_model *m, const vm_tensor *t, size_t o, size_t i, size_t tap) {
    const size_t block = (o / VM_BLOCK * VM_BLOCKS(t->weight.in) + i / VM_BLOCK) * t->taps + tap;
    float *packed = (float *)((char *)m->weights + t->offset);
    return packed + (block * t->depth + i % VM_BLOCK) * VM_BLOCK + o % VM_BLOCK;
}

/* Tensor by tensor: the host holds one of them in float, never the model. */
static vm_status set_on_device(vm_model *m, const vm_tensor *t, vm_dtype dtype, const void *data) {
    const vm_device *d = m->backend->device;
    const size_t n = t->weight.out * t->weight.in * t->taps;
    float *floats;
    vm_status s = vm_mem_alloc(m->host, VM_WEIGHTS, n * sizeof *floats, (void **)&floats);
    if (s) return s;
    bool finite = true;
    for (size_t i = 0; i < n; i++) finite &= isfinite(floats[i] = element(dtype, data, i)) != 0;
    if (!finite)
        s = vm_fail(VM_EINVAL, "%s: want finite numbers, got Inf or NaN", t->name);
    else if ((s = d->set_weight(m->backend, &t->weight, (char *)m->weights + t->offset, floats)))
        vm_fail(s, "%s: %s", t->name, d->error());
    vm_mem_free(m->host, VM_WEIGHTS, floats, n * sizeof *floats);
    return s;
}

vm_status vm_weights_set(vm_model *m, size_t tensor, vm_dtype dtype, const void *data) {
    vm_tensor *t = &m->tensor[tensor];
    size_t n = 0;
    if (m->backend) {
        vm_status s = set_on_device(m, t, dtype, data);
        if (s) return s;
    } else {
        for (size_t o = 0; o < t->weight.out; o++)
            for (size_t i = 0; i < t->weight.in; i++)
                for (size_t tap = 0; tap < t->taps; tap++) *packed_at(m, t, o, i, tap) = element(dtype, data, n++);
    }
    t->set = true;
    return VM_OK;
}

vm_status vm_weights_get(const vm_model *m, size_t tensor, float *data) {
    const vm_tensor *t = &m->tensor[tensor];
    if (m->backend)
        return vm_fail(VM_EINVAL, "%s: want a model on the CPU, got one on %s, whose copy is rounded and folded",
                       t->name, m->backend->name);
    for (size_t o = 0; o < t->weight.out; o++)
        for (size_t i = 0; i < t->weight.in; i++)
            for (size_t tap = 0; tap < t->taps; tap++) *data++ = *packed_at(m, t, o, i, tap);
    return VM_OK;
}

vm_status vm_model_new(const vm_arch *arch, unsigned parts, const vm_backend *backend, vm_model **out) {
    *out = NULL;
    vm_status s = vm_arch_check(arch);
    if (s) return s;
    vm_mem *host = vm_mem_new(NULL), *mem = !host ? NULL : backend ? vm_mem_new(backend) : vm_mem_retain(host);
    void *block;
    if (!mem || vm_mem_alloc(host, VM_WEIGHTS, sizeof(vm_model), &block)) {
        vm_mem_release(mem);
        vm_mem_release(host);
        return VM_ENOMEM;
    }
    vm_model *m = block;
    m->host = host;
    m->mem = mem;
    m->backend = backend;
    m->weights_bytes = backend ? VM_STATE : 0;
    m->arch = *arch;
    m->parts = parts;
    for (vm_op op = 0; op < VM_OPS && !s; op++)
        if (parts & 1u << op) s = vm_passes_build(m, op);
    if (!s) s = vm_mem_alloc(mem, VM_WEIGHTS, m->weights_bytes, &m->weights);
    if (s)
        vm_model_free(m);
    else
        *out = m;
    return s;
}

void vm_model_free(vm_model *m) {
    if (!m) return;
    vm_mem *host = m->host;
    vm_model_trim(m);
    vm_mem_free(m->mem, VM_WEIGHTS, m->weights, m->weights_bytes);
    vm_mem_release(m->mem);
    vm_mem_free(host, VM_WEIGHTS, m->tensor, vm_mem_room(m->tensors) * sizeof *m->tensor);
    for (vm_op op = 0; op < VM_OPS; op++) {
        vm_mem_free(host, VM_WEIGHTS, m->graph[op].node, vm_mem_room(m->graph[op].nodes) * sizeof(vm_node));
        vm_mem_free(host, VM_WEIGHTS, m->graph[op].value, vm_mem_room(m->graph[op].values) * sizeof(vm_value));
    }
    vm_mem_free(host, VM_WEIGHTS, m, sizeof *m);
    vm_mem_release(host);
}
