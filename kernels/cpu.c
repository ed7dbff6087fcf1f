/* The CPU backends, chosen by what this processor and its operating system really offer: feature
 * bits and XGETBV, never the model number (it can be masked). */
#include <string.h>

#include "cpu.h"

static struct {
    char names[64];
} disabled;

void vm_cpu_disable(const char *names) { strncpy(disabled.names, names ? names : "", sizeof disabled.names - 1); }

#if defined(VM_HAVE_X86) || defined(VM_HAVE_NEON)
static bool is_disabled(const char *name) {
    const size_t n = strlen(name);
    for (const char *p = disabled.names; (p = strstr(p, name)); p += n)
        if ((p == disabled.names || p[-1] == ',') && (p[n] == 0 || p[n] == ',')) return true;
    return false;
}
#endif

#ifdef VM_HAVE_X86
#include <cpuid.h>

static uint64_t xcr0(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* Does the system save what `state` names in XCR0 (6: YMM; 0xe6: ZMM and masks)? */
static bool os_saves(uint64_t state) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_OSXSAVE) && (xcr0() & state) == state;
}

/* x86-64 is not without SSE2. */
static bool sse_usable(void) { return !is_disabled("sse"); }

static bool avx2_usable(void) {
    unsigned a, b, c, d;
    if (is_disabled("avx2") || !os_saves(0x6)) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_FMA)) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

static bool avx512_usable(void) {
    unsigned a, b, c, d;
    const unsigned want = bit_AVX512F | bit_AVX512VL | bit_AVX512BW | bit_AVX512DQ;
    if (is_disabled("avx512") || !os_saves(0xe6)) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & want) == want;
}
#endif

#ifdef VM_HAVE_NEON
/* AArch64 is not without Advanced SIMD. */
static bool neon_usable(void) { return !is_disabled("neon"); }
#endif

const vm_cpu_ops *vm_cpu_ops_named(const char *name) {
#ifdef VM_HAVE_X86
    if (!strcmp(name, "avx512")) return &vm_cpu_avx512;
    if (!strcmp(name, "avx2")) return &vm_cpu_avx2;
    if (!strcmp(name, "sse")) return &vm_cpu_sse;
#endif
#ifdef VM_HAVE_NEON
    if (!strcmp(name, "neon")) return &vm_cpu_neon;
#endif
    return strcmp(name, "ref") ? NULL : &vm_cpu_ref;
}

static bool always(void) { return true; }

/* How a pass is computed, chosen from its shape alone. Winograd's way wants a 3x3 convolution between rows, of enough
 * pixels that transforming its weights pays. After nearest 2x, which stands between rows, it is the only one. */
static const vm_method *method_of(const vm_pass *p) {
    enum { WORTH = 1024 /* pixels: with fewer, transforming the weights costs more than it saves */ };
    if (p->kind == VM_PASS_ATTENTION) return &vm_attention;
    if (p->up) return &vm_winograd;
    const bool three = p->ksize == 3 && p->stride == 1;
    const bool rows = p->x_format == VM_ROWS && p->y_format == VM_ROWS;
    const bool wide = p->x.c >= 2 * VM_BLOCK && p->y.c >= 2 * VM_BLOCK;
    return three && rows && wide && p->y.h * p->y.w >= WORTH ? &vm_winograd : &vm_direct;
}

static vm_cut cut(const vm_backend *b, const vm_pass *p) {
    (void)b;
    return method_of(p)->cut(p);
}

static size_t parts(const vm_backend *b, const vm_pass *p, const vm_limits *limits) {
    (void)b, (void)p, (void)limits;
    return 1;
}

static size_t prepared(const vm_backend *b, const vm_pass *p, size_t at_once) {
    (void)b;
    return method_of(p)->prepared(p, at_once);
}

static size_t scratch(const vm_backend *b, const vm_pass *p, const vm_limits *limits) {
    (void)b;
    return VM_PRODUCT(limits->threads, method_of(p)->scratch(p));
}

static vm_status workspace(const vm_backend *b, const vm_pass *p, const vm_limits *limits, size_t *bytes) {
    (void)b, (void)p, (void)limits;
    *bytes = 0;
    return VM_OK;
}

static vm_status prepare(const vm_backend *b, const vm_pass *p, const vm_operands *at, const vm_exec *exec,
                         vm_tasks *out) {
    return method_of(p)->prepare(b->self, p, at, exec, out);
}

static vm_status run(const vm_backend *b, const vm_pass *p, const vm_operands *at, const vm_exec *exec) {
    const vm_cut c = cut(b, p);
    vm_tasks tasks;
    vm_status s = prepare(b, p, at, exec, &tasks);
    if (!s) s = exec->each(exec->pool, c.rows * c.columns, p->y.h, tasks.fn, tasks.job);
    if (!s && tasks.merge) tasks.merge(tasks.job, 0, c.rows);
    return s;
}

#define VM_CPU_BACKEND(NAME, USABLE)                        \
    static const vm_backend NAME = {.name = #NAME,          \
                                    .usable = USABLE,       \
                                    .element = 4,           \
                                    .cut = cut,             \
                                    .prepared = prepared,   \
                                    .scratch = scratch,     \
                                    .workspace = workspace, \
                                    .parts = parts,         \
                                    .run = run,             \
                                    .prepare = prepare,     \
                                    .device = &vm_host,     \
                                    .self = (void *)&vm_cpu_##NAME};

VM_CPU_BACKEND(ref, always)
#ifdef VM_HAVE_X86
VM_CPU_BACKEND(sse, sse_usable)
VM_CPU_BACKEND(avx2, avx2_usable)
VM_CPU_BACKEND(avx512, avx512_usable)
#endif
#ifdef VM_HAVE_NEON
VM_CPU_BACKEND(neon, neon_usable)
#endif

const vm_backend *const *vm_backends(void) {
    static const vm_backend *const all[] = {
#ifdef VM_HAVE_X86
        &avx512, &avx2, &sse,
#endif
#ifdef VM_HAVE_NEON
        &neon,
#endif
        &ref,    NULL,
    };
    return all;
}
