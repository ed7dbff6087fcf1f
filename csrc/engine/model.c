/* A model: an architecture, its passes, their weights, and the arena of its runs. */
#include "../vm.h"

/* The statistics of latents that come with the weights, which only pipelines read, no pass: the running ones of
 * AutoencoderKLFlux2's BatchNorm, or those of VM_LTX. */
static vm_status add_statistics(vm_model *m) {
    const size_t *patch = m->arch.patch_size, c = VM_PRODUCT(patch[0], patch[1], m->arch.latent_channels);
    const bool ltx = m->arch.family == VM_LTX;
    const vm_weight w = {ltx ? m->arch.latent_channels : c, 1, 1, .vector = true};
    const bool added = !w.out || (vm_weights_add(m, ltx ? "latents_mean" : "bn.running_mean", 1, &w) != VM_NONE &&
                                  vm_weights_add(m, ltx ? "latents_std" : "bn.running_var", 1, &w) != VM_NONE);
    return added ? VM_OK : VM_ENOMEM;
}

vm_status vm_model_new(const vm_arch *arch, unsigned parts, const vm_backend *backend, vm_model **out) {
    const bool on_host = backend->device == &vm_host;
    *out = NULL;
    vm_status s = vm_arch_check(arch);
    if (s) return s;
    vm_mem *mem = vm_mem_new(backend), *host = on_host ? mem : vm_mem_common;
    void *block;
    if (!mem || vm_mem_alloc(host, VM_WEIGHTS, sizeof(vm_model), &block)) {
        vm_mem_release(mem);
        return VM_ENOMEM;
    }
    vm_model *m = block;
    m->mem = mem;
    m->host = host;
    m->backend = backend;
    m->arch = *arch;
    m->parts = parts;
    for (vm_op op = 0; op < VM_OPS; op++)
        if (parts & 1u << op) {
            if (!vm_passes_are_of_videos(m) && (s = vm_passes_build(m, op, false))) goto done;
            if (arch->videos && (s = vm_passes_build(m, op, true))) goto done;
        }
    if ((s = add_statistics(m))) goto done;
    s = vm_mem_alloc(mem, VM_WEIGHTS, m->weights_bytes, &m->weights);
done:
    if (s)
        vm_model_free(m);
    else
        *out = m;
    return s;
}

void vm_model_free(vm_model *m) {
    if (!m) return;
    vm_mem *mem = m->mem, *host = m->host;
    vm_model_trim(m);
    vm_mem_free(mem, VM_WEIGHTS, m->weights, m->weights_bytes);
    vm_mem_free(host, VM_WEIGHTS, m->tensor, vm_mem_capacity(m->tensors) * sizeof *m->tensor);
    for (vm_op op = 0; op < VM_OPS; op++)
        for (int video = 0; video < 2; video++) {
            vm_graph *g = video ? &m->video[op] : &m->graph[op];
            vm_mem_free(host, VM_WEIGHTS, g->node, vm_mem_capacity(g->nodes) * sizeof(vm_node));
        }
    vm_mem_free(host, VM_WEIGHTS, m, sizeof *m);
    vm_mem_release(mem);
}

void vm_model_trim(vm_model *m) {
    vm_model_trim_arena(m);
    vm_plan_free(m, m->plan);
    m->plan = NULL;
}

void vm_model_trim_arena(vm_model *m) {
    vm_mem_unreserve(m->mem, m->arena, m->arena_bytes);
    m->arena = NULL;
    m->arena_bytes = 0;
}
