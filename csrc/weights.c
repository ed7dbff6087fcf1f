/* The model object and its weights: one packed copy, in the order in which the passes ask for it.
 *
 *   convolution, linear   [out/16][in/16][taps][min(16, in)][16 out]   (zero where out or in end)
 *   vector                [c/16][16]
 *
 * Tensors lie end to end, so the three projections of an attention are one convolution with three
 * times the channels. Packing only moves numbers: get returns bit for bit what set was given. */
#include <stdio.h>
#include <string.h>

#include "vm.h"

int vm_weights_add(vm_model *m, const char *name, size_t dims, size_t out, size_t in, size_t k) {
    if (vm_mem_grow(m->mem, VM_WEIGHTS, (void **)&m->tensor, m->tensors, sizeof *m->tensor)) return VM_NONE;
    vm_tensor *t = &m->tensor[m->tensors];
    snprintf(t->name, sizeof t->name, "%s", name);
    t->dims = dims;
    t->shape[0] = out;
    t->shape[1] = in;
    t->shape[2] = t->shape[3] = k;
    t->out = out;
    t->in = in;
    t->taps = k * k;
    t->depth = VM_MIN(in, VM_BLOCK);
    t->offset = m->weights_floats;
    t->floats = VM_BLOCKS(out) * VM_BLOCK * VM_BLOCKS(in) * t->taps * t->depth;
    m->weights_floats += t->floats;
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

/* Where element (o, i, tap) of the file's layout lies in the packed copy. */
static size_t packed_at(const vm_tensor *t, size_t o, size_t i, size_t tap) {
    const size_t block = (o / VM_BLOCK * VM_BLOCKS(t->in) + i / VM_BLOCK) * t->taps + tap;
    return t->offset + (block * t->depth + i % VM_BLOCK) * VM_BLOCK + o % VM_BLOCK;
}

void vm_weights_set(vm_model *m, size_t tensor, vm_dtype dtype, const void *data) {
    vm_tensor *t = &m->tensor[tensor];
    size_t n = 0;
    for (size_t o = 0; o < t->out; o++)
        for (size_t i = 0; i < t->in; i++)
            for (size_t tap = 0; tap < t->taps; tap++) m->weights[packed_at(t, o, i, tap)] = element(dtype, data, n++);
    t->set = true;
}

void vm_weights_get(const vm_model *m, size_t tensor, float *data) {
    const vm_tensor *t = &m->tensor[tensor];
    for (size_t o = 0; o < t->out; o++)
        for (size_t i = 0; i < t->in; i++)
            for (size_t tap = 0; tap < t->taps; tap++) *data++ = m->weights[packed_at(t, o, i, tap)];
}

vm_status vm_model_new(const vm_arch *arch, unsigned parts, vm_model **out) {
    *out = NULL;
    vm_status s = vm_arch_check(arch);
    if (s) return s;
    vm_mem *mem = vm_mem_new();
    if (!mem) return VM_ENOMEM;
    void *block;
    if ((s = vm_mem_alloc(mem, VM_WEIGHTS, sizeof(vm_model), &block))) {
        vm_mem_release(mem);
        return s;
    }
    vm_model *m = block;
    m->mem = mem;
    m->arch = *arch;
    m->parts = parts;
    for (vm_op op = 0; op < VM_OPS && !s; op++)
        if (parts & 1u << op) s = vm_passes_build(m, op);
    size_t bytes;
    if (!s) s = vm_multiply(&bytes, m->weights_floats, sizeof(float), "weights");
    if (!s) s = vm_mem_alloc(mem, VM_WEIGHTS, bytes, (void **)&m->weights);
    if (s)
        vm_model_free(m);
    else
        *out = m;
    return s;
}

void vm_model_free(vm_model *m) {
    if (!m) return;
    vm_mem *mem = m->mem;
    vm_model_trim(m);
    vm_mem_free(mem, VM_WEIGHTS, m->weights, m->weights_floats * sizeof(float));
    vm_mem_free(mem, VM_WEIGHTS, m->tensor, vm_mem_room(m->tensors) * sizeof *m->tensor);
    for (vm_op op = 0; op < VM_OPS; op++) {
        vm_mem_free(mem, VM_WEIGHTS, m->graph[op].node, vm_mem_room(m->graph[op].nodes) * sizeof(vm_node));
        vm_mem_free(mem, VM_WEIGHTS, m->graph[op].value, vm_mem_room(m->graph[op].values) * sizeof(vm_value));
    }
    vm_mem_free(mem, VM_WEIGHTS, m, sizeof *m);
    vm_mem_release(mem);
}
