/* Plans of any architecture at any size: refused, or every size in them is the true one. */
#include "../../kernels/cpu.h"
#include "input.h"

static void check(const vm_model *m, const vm_request *r, const vm_plan *p) {
    const unsigned __int128 pixels = (unsigned __int128)r->height * r->width;
    const size_t factor = vm_arch_factor(&m->arch);
    const size_t shown = VM_MAX(r->frames, 1), coded = (shown - 1) / ((size_t)1 << vm_arch_halvings(&m->arch)) + 1;
    CHECK(p->out_bytes / (r->op == VM_DECODE ? shown : coded) >=
          (r->op == VM_DECODE ? pixels : pixels / factor / factor));
    unsigned __int128 least = (unsigned __int128)m->weights_bytes + p->arena_bytes;
    if (r->own_output) least += (unsigned __int128)p->out_bytes * r->batch;
    CHECK(p->reserved >= least);
    unsigned __int128 peak = 0;
    for (int c = 0; c < VM_CATEGORIES; c++) peak += p->peak[c];
    CHECK(peak <= p->reserved);
    for (size_t i = 0; i < p->chains; i++) {
        unsigned __int128 live = 0;
        for (int c = 0; c < VM_CATEGORIES; c++) live += p->chain[i].live[c];
        CHECK(live <= peak);
    }
    for (size_t i = 0; i < p->pieces; i++) {
        const vm_piece *a = &p->piece[i];
        CHECK(a->bytes <= p->arena_bytes && a->offset <= p->arena_bytes - a->bytes);
        for (size_t j = 0; j < i; j++) {
            const vm_piece *b = &p->piece[j];
            const bool heirs = a->heir == (int)j || b->heir == (int)i; /* one over the other, row behind row */
            const bool meet = a->first <= b->last && b->first <= a->last && !heirs;
            CHECK(!meet || a->offset + a->bytes <= b->offset || b->offset + b->bytes <= a->offset);
        }
    }
}

/* Such numbers as sets have them that multiply floats whatever the numbers: in Winograd's way, and stored from a tile of
 * the thread's own. */
static const vm_backend *by_floats(vm_dtype dtype, vm_precision precision) {
    static vm_cpu cpu;
    static vm_backend backend;
    cpu = (vm_cpu){&vm_cpu_ref, &vm_cpu_ref.floats, dtype, 0};
    backend = *vm_backend_at(dtype, precision, 0);
    backend.self = &cpu;
    return &backend;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = {data, data + size};
    const vm_arch arch = take_arch(&in);
    const uint64_t flags = take(&in, 1);
    vm_model *m;
    const vm_dtype dtype = (vm_dtype)(flags / 3 % 3);
    const vm_precision precision = (vm_precision)(flags / 9 % 3);
    if (vm_model_new(&arch, 1 + flags % 3, vm_backend_at(dtype, precision, 0), &m)) return 0;
    for (int i = 0; i < 4 && in.at < in.end; i++) {
        const uint64_t how = take(&in, 1);
        const size_t multiple = how & 1 ? vm_arch_factor(&arch) : 1;
        vm_request r = {.op = how & 2 ? VM_ENCODE : VM_DECODE, .backend = vm_backend_at(dtype, precision, 0)};
        if (how & 64) r.backend = by_floats(dtype, precision);
        const vm_format pixels = how & 4 ? VM_U8_NHWC : VM_F32_NCHW;
        r.limits.threads = 1 + (unsigned)(take(&in, 2) % 1024);
        r.height = number(&in) * multiple;
        r.width = number(&in) * multiple;
        r.batch = number(&in);
        if (how & 128 && arch.videos) r.frames = number(&in);
        r.in = r.op == VM_ENCODE ? pixels : VM_F32_NCHW;
        r.out = r.op == VM_DECODE ? pixels : VM_F32_NCHW;
        r.own_output = how & 8;
        if (how & 32) r.memory_limit = number(&in);
        r.scaled = how & 16;
        vm_plan *p;
        const vm_status s = vm_plan_new(m, &r, &p);
        if (!s) check(m, &r, p);
        if (!s && r.memory_limit) CHECK(p->reserved <= r.memory_limit);
        vm_plan_free(m, p);
    }
    vm_model_free(m);
    return 0;
}
