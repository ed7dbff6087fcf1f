/* Walks calls of every VAE that vaemem knows, plays them on simulated allocators and prints what each comes to.
 * test_32bit.py builds it for addresses of 32 and of 64 bits, which have to print the same. */
#include "../csrc/predict/workspace/lookup.h"
#include "../csrc/predict/modules/program.h"

#include <stdio.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define GIB ((uint64_t)1 << 30)

static const vm_talloc_config allocators[] = {
    {0},
    {.total_memory = 24 * GIB, .allowed_memory = 20 * GIB, .max_split_size = 5 * GIB, .gc_threshold = 0.7},
    {.total_memory = 80 * GIB, .expandable_segments = true},
    {.total_memory = 6 * GIB, .driver_pool = true},
};

static const struct {
    uint64_t height, width, batch, tile;
    double overlap;
    bool slicing, sent, channels_last;
} calls[] = {
    {512, 512, 1, 0, 0.25, false, false, false},   {8192, 8192, 1, 0, 0.25, false, false, false},
    {1024, 768, 4, 0, 0.25, false, true, false},   {2048, 4096, 3, 0, 0.25, true, false, false},
    {4096, 4096, 16, 0, 0.25, false, false, true}, {4096, 8192, 2, 2048, 0.1, false, false, false},
};

static const vm_passing sent[] = {
    {"decoder", "decoder", "all", 1 << 20, VM_BY_DIFFUSERS},
    {"decoder.conv_in", "decoder.conv_in", "weight", 4 << 20, VM_BY_ACCELERATE},
    {"encoder.conv_in", "encoder.conv_in", "weight", 5 << 20, VM_BY_ACCELERATE},
};

/* Everything that was counted for a call, folded into one number (FNV-1a). */
static uint64_t fold(uint64_t sum, uint64_t number) { return (sum ^ number) * 0x100000001b3; }

static uint64_t now(const vm_talloc *a, vm_talloc_kind kind) {
    return (uint64_t)vm_talloc_get_stats(a)->of[kind][VM_TALLOC_ALL].current;
}

static vm_status pass_through(vm_talloc *a, uint64_t bytes) {
    uint64_t address;
    const vm_status s = vm_talloc_malloc(a, bytes, 0, &address);
    return s ? s : vm_talloc_free(a, address);
}

static vm_status play(vm_talloc *a, const vm_trace_step *step, const uint64_t *workspace, uint64_t *address) {
    switch (step->op) {
    case VM_TRACE_TAKE: return vm_talloc_malloc(a, step->bytes, 0, &address[step->id]);
    case VM_TRACE_GIVE: return vm_talloc_free(a, address[step->id]);
    case VM_TRACE_CONV: return pass_through(a, workspace[step->id]);
    case VM_TRACE_EMPTY: return vm_talloc_empty_cache(a);
    default: return pass_through(a, 8519680);
    }
}

static void play_all(const vm_talloc_config *config, const vm_trace *t, const uint64_t *workspace) {
    vm_talloc *a = NULL;
    uint64_t *address = NULL, sum = 0;
    vm_status s = vm_talloc_new(config, &a);
    if (!s) s = vm_scratch_new(t->ids, sizeof *address, &address);
    for (size_t i = 0; !s && i < t->steps; i++) {
        s = play(a, &t->step[i], workspace, address);
        sum = fold(fold(sum, now(a, VM_TALLOC_ALLOCATED_BYTES)), now(a, VM_TALLOC_RESERVED_BYTES));
        if (t->step[i].op == VM_TRACE_TAKE) sum = fold(sum, address[t->step[i].id]);
    }
    if (a) {
        const vm_talloc_stats *stats = vm_talloc_get_stats(a);
        printf("  allocated %" PRId64 ", reserved %" PRId64 ", sum %016" PRIx64 "%s%s\n",
               stats->of[VM_TALLOC_ALLOCATED_BYTES][VM_TALLOC_ALL].peak,
               stats->of[VM_TALLOC_RESERVED_BYTES][VM_TALLOC_ALL].peak, sum, s ? ": " : "", s ? vm_error() : "");
    }
    vm_scratch_free(address);
    vm_talloc_delete(a);
}

/* What PyTorch's own code takes, or else cuDNN by a formula that uses all terms. */
static vm_status look_up(vm_lookup *l, const vm_conv *conv, uint64_t *bytes) {
    static const vm_formula formula = {
        .times = {1, 2, 3, 1, 1, 1}, .index = 5, .tile = 96, .per_tile = 1000, .constant = -128};
    uint64_t size[VM_SIZES];
    size_t count;
    vm_known known;
    vm_status s = vm_lookup_conv(l, conv, &known);
    *bytes = known.bytes;
    if (s || vm_lookup_sources(l, &count)[known.source].own) return s;
    s = vm_conv_sizes(conv, size);
    return s ? s : vm_formula_bytes(&formula, size, bytes);
}

static void show(vm_lookup *l, const vm_trace *t) {
    uint64_t *workspace = NULL, sum = 0, taken = 0;
    vm_status s = vm_scratch_new(t->convs, sizeof *workspace, &workspace);
    for (size_t i = 0; i < t->steps; i++) {
        const vm_trace_step *step = &t->step[i];
        sum = fold(fold(fold(sum, step->op), step->id), step->bytes);
        taken += step->bytes;
    }
    for (size_t i = 0; !s && i < t->convs; i++) {
        s = look_up(l, &t->conv[i], &workspace[i]);
        sum = fold(sum, workspace[i]);
    }
    printf("%zu steps, %" PRIu64 " bytes, %" PRIu64 " FLOPs, %" PRIu64 " attended, %" PRIu64 " moved, %" PRIu64
           " sent, sum %016" PRIx64 "%s%s\n",
           t->steps, taken, t->flops, t->attended, t->moved, t->sent, sum, s ? ": " : "", s ? vm_error() : "");
    for (size_t i = 0; !s && i < COUNT(allocators); i++) play_all(&allocators[i], t, workspace);
    vm_scratch_free(workspace);
}

static void show_vae(vm_lookup *l, const vm_trace_vae *v) {
    vm_trace *t;
    printf("%s %s %s %s %" PRIu64 " x %" PRIu64 ", batch %" PRIu64 ", tile %" PRIu64 ": ", v->arch->name,
           vm_trace_runtime_name[v->runtime], v->op == VM_ENCODE ? "encode" : "decode", vm_dtype_name(v->dtype),
           v->height, v->width, v->batch, v->tile);
    if (vm_trace_vae_build(v, &t))
        printf("%s\n", vm_error());
    else
        show(l, t), vm_trace_free(t);
}

static void show_calls(vm_lookup *l, const vm_arch *arch, vm_trace_runtime runtime) {
    for (size_t i = 0; i < COUNT(calls); i++)
        for (int k = 0; k < 2 * 3; k++)
            show_vae(l, &(vm_trace_vae){.arch = arch,
                                        .runtime = runtime,
                                        .op = (vm_op)(k % 2),
                                        .dtype = (vm_dtype)(k / 2),
                                        .first = (vm_dtype)(k / 2),
                                        .frames = 1,
                                        .height = calls[i].height,
                                        .width = calls[i].width,
                                        .batch = calls[i].batch,
                                        .tile = calls[i].tile,
                                        .tile_overlap = calls[i].overlap,
                                        .slicing = calls[i].slicing,
                                        .passing = {calls[i].sent ? COUNT(sent) : 0, sent},
                                        .channels_last = calls[i].channels_last,
                                        .release = 42,
                                        .gpu = {86, 84, 24 * GIB}});
}

static void show_parameters(const vm_arch *arch, vm_trace_runtime runtime) {
    vm_parameters *p;
    uint64_t numbers = 0;
    if (vm_trace_vae_parameters(arch, runtime, &p)) return;
    for (size_t i = 0; i < p->count; i++) {
        uint64_t of = 1;
        for (int d = 0; d < p->item[i].dims; d++) of *= p->item[i].shape[d];
        numbers += of;
    }
    printf("%s %s: %zu tensors, %" PRIu64 " numbers\n", arch->name, vm_trace_runtime_name[runtime], p->count, numbers);
    vm_parameters_free(p);
}

/* A convolution and an attention of 8 heads over h x h pixels. */
static const char program[] =
    "name module\nvariables n h\ncall float32 float16 bfloat16\n"
    "size 1 n\nsize 320\nsize 1 h\nsize 3\nsize 1\nsize 1280 n h h\nsize 8\nsize 1 h h\n"
    "size 40\nsize 0\nconv run 0 1 2 2 1 3 4 4 0\n"
    "attention run 0 6 6 7 7 8 8 9 9 0 0 0 0 1 1 1\nmodule +5:x c0 a0 b5 -1 -2\n";

static void show_program(vm_lookup *l) {
    vm_program *p;
    if (vm_program_read(program, &p)) puts(vm_error());
    for (int64_t h = 64; p && h <= (int64_t)1 << 32; h *= 8)
        for (int dtype = VM_F32; dtype <= VM_BF16; dtype++) {
            vm_trace *t;
            const vm_program_call call = {.dtype = (vm_dtype)dtype, .value = {2, h}, .gpu = {86, 84, 0}};
            printf("module %s %" PRId64 ": ", vm_dtype_name(call.dtype), h);
            if (vm_program_trace(p, &call, &t))
                printf("%s\n", vm_error());
            else
                show(l, t), vm_trace_free(t);
        }
    vm_program_free(p);
}

int main(void) {
    /* Before cuDNN 9.3 PyTorch unfolds large inputs by code of its own. */
    const vm_lookup_torch torch = {.sm = 86, .cudnn = 90100, .release = 205};
    vm_lookup *l;
    if (vm_lookup_new(&torch, true, VM_GUESS_RULE, &l)) return 1;
    for (const vm_arch *const *arch = vm_arch_models(); *arch; arch++)
        for (int runtime = 0; runtime < VM_TORCH_RUNTIMES; runtime++) {
            show_parameters(*arch, (vm_trace_runtime)runtime);
            show_calls(l, *arch, (vm_trace_runtime)runtime);
        }
    show_program(l);
    vm_lookup_free(l);
    return 0;
}
