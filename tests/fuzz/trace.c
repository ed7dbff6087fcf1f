/* Traces built from any architecture or step by step, and run: what a call does not keep is given back. */
#include "../../csrc/predict/play.h"
#include "input.h"

static vm_trace *build(input *in) {
    vm_arch arch = take_arch(in);
    const uint64_t how = take(in, 1);
    vm_trace_vae v = {.arch = &arch,
                      .runtime = how & 1 ? take(in, 1) % VM_TORCH_RUNTIMES : VM_TORCH_DIFFUSERS,
                      .op = how & 2 ? VM_ENCODE : VM_DECODE,
                      .dtype = how / 4 % 3};
    const size_t factor = vm_arch_factor(&arch);
    v.slicing = how & 16;
    const size_t unit = how & 64 ? factor : 1;
    v.batch = number(in);
    v.gpu = (vm_trace_gpu){.sm = (int)take(in, 1), .multiprocessors = (int)take(in, 4)};
    v.gpu.free_bytes = v.runtime == VM_TORCH_A1111 ? number(in) : 0;
    v.tile = how & 32 ? number(in) * unit : 0;
    v.height = number(in) * unit;
    v.width = number(in) * unit;
    const uint64_t more = take(in, 1);
    v.first = more & 1 ? more / 2 % 3 : v.dtype;
    const vm_passing passing[] = {{"decoder", "decoder", "all", 512, VM_BY_DIFFUSERS},
                                  {"decoder.conv_in", "decoder", "weight", 64, VM_BY_ACCELERATE}};
    v.passing = (vm_passings){more & 8 ? 2 : 0, passing};
    v.frames = more & 4 ? 3 : 1;
    if (more & 4) snprintf(arch.name, sizeof arch.name, "wan2.1");
    v.tile_overlap = more & 16 ? (double)(more / 32) / 8 : 0.25;
    vm_trace *t;
    if (how & 128) {
        vm_parameters *p;
        CHECK(vm_trace_vae_parameters(&arch, v.runtime, &p) || p->count);
        vm_parameters_free(p);
    }
    return vm_trace_vae_build(&v, &t) ? NULL : t;
}

static vm_trace *record(input *in) {
    vm_trace *t;
    if (vm_trace_new(&t)) return NULL;
    for (int step = 0; step < 64 && in->at < in->end; step++) {
        const uint64_t op = take(in, 1);
        char name[256] = {0};
        memset(name, (int)(op | 1), op / 8 * 8);
        uint32_t id[2];
        switch (op % 8) {
        case 0: vm_trace_give(t, (uint32_t)number(in)); break;
        case 1: vm_trace_give(t, t->ids ? (uint32_t)(take(in, 1) % t->ids) : 0); break;
        case 2: vm_trace_blas(t, take(in, 1) & 1 ? VM_TRACE_CUBLAS : VM_TRACE_CUBLASLT, name); break;
        case 3: {
            const vm_dtype dtype = take(in, 1) % 3;
            const int64_t n = (int64_t)number(in), channels = (int64_t)number(in), side = (int64_t)number(in);
            const vm_conv c = vm_conv_square(dtype, (int64_t[]){n, channels, side, side}, 1, 1, 1, 0);
            vm_trace_conv(t, &c, name);
            break;
        }
        case 4: {
            const size_t n = number(in), c = number(in), groups = number(in), pixels = number(in);
            vm_trace_norm(t, take(in, 1) % 3, n, c, groups, pixels, name, id);
            break;
        }
        case 5: {
            const uint64_t kind = take(in, 1);
            const vm_trace_gpu gpu = {.sm = (int)take(in, 1), .multiprocessors = (int)take(in, 4)};
            const uint64_t flags = take(in, 1);
            const size_t n = number(in), heads = number(in), queries = number(in), keys = number(in),
                         depth = number(in);
            const vm_heads q = {4, n, heads, queries, depth, flags & 1, flags & 2};
            const vm_heads k = {4, n, flags & 4 ? 1 : heads, keys, depth, flags & 1, flags & 8};
            const vm_sdpa call = {
                .dtype = kind % 3, .q = q, .k = k, .v = k, .causal = flags & 16, .grouped = flags & 4};
            vm_trace_attention(t, &call, kind / 4 % 4, &gpu, name, id);
            break;
        }
        default: vm_trace_take(t, number(in), name, id);
        }
    }
    return t;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = {data, data + size};
    const uint64_t how = take(&in, 1);
    vm_talloc_config config = {.total_memory = how & 2 ? number(&in) << 20 : 0, .expandable_segments = how & 4};
    const vm_blas blas = {number(&in), number(&in), how / 8 % 3};
    const uint64_t workspace = number(&in);
    vm_talloc *talloc;
    vm_script *script;
    vm_play *p;
    vm_trace *t = how & 1 ? build(&in) : record(&in);
    if (!t || vm_talloc_new(&config, &talloc)) {
        vm_trace_free(t);
        return 0;
    }
    vm_trace_want want[VM_TRACE_WANTS];
    size_t wants;
    CHECK(!vm_trace_wants(t, workspace, UINT64_MAX, how & 64, workspace / 2, want, &wants) && wants <= VM_TRACE_WANTS);
    CHECK(!vm_script_new(&script) && !vm_play_new(script, talloc, &blas, config.total_memory, &p));
    vm_play_note_heights(p, true);
    uint64_t *workspaces = calloc(t->convs + 1, 8);
    for (size_t i = 0; i < t->convs; i++) workspaces[i] = workspace;
    uint64_t *next = calloc(t->convs + 1, 8); /* 0 bytes for other plans, or none */
    if (!(how & 128)) memcpy(next, workspaces, t->convs * sizeof *next);
    const vm_event *e;
    CHECK(!vm_script_call(script, t, &e));
    const vm_event event = *e;
    CHECK(!vm_play_answer_call(p, &script->call[event.of], workspaces, next));
    if (!vm_play_follow(p, script)) {
        const vm_heights *const h = vm_play_heights(p);
        for (size_t i = 0; i < h->of->trace->steps; i++) CHECK(h->allocated[i] <= h->reserved[i]);
        for (uint32_t i = 0; i < event.count; i++) {
            const uint32_t id = event.first + i;
            CHECK(vm_play_has(p, id) && !vm_script_give(script, &id, 1) && !vm_play_follow(p, script));
        }
    }
    const uint64_t left = (uint64_t)vm_talloc_get_stats(talloc)->of[VM_TALLOC_ALLOCATED_BYTES][VM_TALLOC_ALL].current;
    CHECK(left <= vm_talloc_round(&config, blas.cublas_bytes) + vm_talloc_round(&config, blas.cublaslt_bytes));
    free(workspaces);
    free(next);
    vm_play_free(p);
    vm_script_free(script);
    vm_talloc_delete(talloc);
    vm_trace_free(t);
    return 0;
}
