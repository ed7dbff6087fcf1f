/* A model's weights: the tensors of its passes, one packed copy of each in the device's memory, in the order in which
 * the passes registered them. */
#include <stdio.h>
#include <string.h>

#include "../vm.h"

int vm_weights_add(vm_model *m, const char *name, size_t dims, const vm_weight *w) {
    if (vm_mem_grow(m->host, VM_WEIGHTS, (void **)&m->tensor, m->tensors, sizeof *m->tensor)) return VM_NONE;
    vm_tensor *t = &m->tensor[m->tensors];
    *t = (vm_tensor){.dims = dims,
                     .shape = {w->out, w->in, dims > 4 ? (size_t)w->past + 1 : w->ksize, w->ksize, w->ksize},
                     .weight = *w,
                     .offset = m->weights_bytes,
                     .bytes = m->backend->device->weight_bytes(m->backend, w)};
    snprintf(t->name, sizeof t->name, "%s", name);
    m->weights_bytes = vm_sum(m->weights_bytes, t->bytes);
    return (int)m->tensors++;
}

const vm_tensor *vm_weights_find(const vm_model *m, const char *name) {
    for (size_t i = 0; i < m->tensors; i++)
        if (!strcmp(m->tensor[i].name, name)) return &m->tensor[i];
    return NULL;
}

vm_status vm_weights_check(const vm_model *m) {
    for (size_t i = 0; i < m->tensors; i++)
        if (!m->tensor[i].set) return vm_fail(VM_EINVAL, "weights: %s was never set", m->tensor[i].name);
    return VM_OK;
}

vm_status vm_weights_set(vm_model *m, size_t tensor, vm_dtype dtype, const void *data) {
    vm_tensor *t = &m->tensor[tensor];
    const vm_device *d = m->backend->device;
    vm_status s = d->set_weight(m->backend, &t->weight, (char *)m->weights + t->offset, dtype, data, &t->rounded);
    t->set |= !s;
    return vm_device_fail(d, s, t->name);
}

vm_status vm_weights_get(const vm_model *m, size_t tensor, float *data) {
    const vm_tensor *t = &m->tensor[tensor];
    const vm_device *d = m->backend->device;
    return vm_device_fail(d, d->get_weight(m->backend, &t->weight, (const char *)m->weights + t->offset, data),
                          t->name);
}
