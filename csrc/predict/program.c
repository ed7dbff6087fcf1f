/* Reading a program, and playing it.
 *
 * Polynomials stay the texts that they are, which are short and evaluated once a call; words become steps. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "polynomial.h"
#include "program.h"

/* A word: + - c a b l with a number (of a size, of takes ago, of a convolution ...), or = with that of a module. */
typedef struct step {
    char kind;
    uint32_t number;
    const char *name; /* + and =: what, or whom */
} step;

/* takes: of its whole call; reach: how many takes before it the farthest give goes. */
typedef struct module {
    size_t first, steps;
    uint64_t takes, reach, plays;
    size_t depth, path;
} module;

typedef struct question {
    int dtype; /* -1: the call's own */
    bool nhwc, masked, boolean, causal, grouped;
    uint32_t size[9];
} question;

/* Where in each list its own begin, and how many they are. */
typedef struct span {
    size_t first, count;
} span;

enum { SIZES, CONVS, ATTENTIONS, MODULES, LISTS };

typedef struct recorded {
    const char *dtypes, *cases; /* "float16 bfloat16", "1 n = 1; 1 h != 2 h1" */
    span own[LISTS];
} recorded;

typedef struct derived {
    const char *polynomial;
    int64_t by, to;
} derived;

struct vm_program {
    char *text; /* lines end with 0 */
    size_t length, given, names, calls, steps, count[LISTS];
    const char *title, *name[VM_PROGRAM_NAMES];
    derived follows[VM_PROGRAM_NAMES];
    recorded *call;
    step *step;
    const char **size;
    question *conv, *attention;
    module *module;
};

/* ---- reading ---- */

static int dtype_of(vm_word w) {
    for (int d = VM_F32; d <= VM_BF16; d++)
        if (vm_word_is(w, vm_dtype_name((vm_dtype)d))) return d;
    return -1;
}

static vm_status grow(void *array, size_t count, size_t item) {
    return vm_mem_grow(vm_mem_common, VM_SCRATCH, array, count, item);
}

static span *own(vm_program *p, int list) { return &p->call[p->calls - 1].own[list]; }

static vm_status bad(const char *want) { return vm_fail(VM_EINVAL, "want %s", want); }

/* The index of something that the call has of a list. */
static bool to_index(vm_program *p, vm_word w, int list, uint32_t *out) {
    int64_t number;
    if (!vm_word_number(w, &number) || number < 0 || (uint64_t)number >= own(p, list)->count) return false;
    *out = (uint32_t)number;
    return true;
}

static vm_status add_name(vm_program *p, const char *name) {
    if (p->names == VM_PROGRAM_NAMES) return bad("at most 64 variables");
    p->name[p->names++] = name;
    return VM_OK;
}

static vm_status read_variables(vm_program *p, char *line) {
    vm_status s = VM_OK;
    for (char *at = line; !s && *at;) {
        s = add_name(p, at);
        at += strcspn(at, " ");
        if (*at) *at++ = 0;
    }
    p->given = p->names;
    return s;
}

static vm_status read_derived(vm_program *p, char *line) {
    const char *at = line + strcspn(line, " ");
    derived d;
    if (!vm_word_number(vm_next_word(&at), &d.by) || !vm_word_number(vm_next_word(&at), &d.to) || d.by < 1 || d.to < 1)
        return bad("a name, two numbers of 1 or more, and a polynomial");
    d.polynomial = at;
    line[strcspn(line, " ")] = 0;
    const int64_t zeros[VM_PROGRAM_NAMES] = {0};
    int64_t value;
    vm_status s = vm_polynomial(&(vm_scope){p->names, p->name, zeros}, d.polynomial, &value);
    if (!s) s = add_name(p, line);
    if (!s) p->follows[p->names - 1] = d;
    return s;
}

static vm_status read_call(vm_program *p, char *line) {
    const int64_t zeros[VM_PROGRAM_NAMES] = {0};
    const vm_scope scope = {p->names, p->name, zeros};
    vm_status s = grow(&p->call, p->calls, sizeof *p->call);
    if (s) return s;
    recorded *c = &p->call[p->calls++];
    *c = (recorded){.dtypes = line, .cases = ""};
    for (int list = 0; list < LISTS; list++) c->own[list].first = p->count[list];
    const char *at = line;
    vm_word w;
    while ((w = vm_next_word(&at)).length)
        if (dtype_of(w) < 0) return bad("dtypes, and cases behind semicolons");
    if (*at == ';') c->cases = at + 1;
    while (!s && *at == ';') {
        bool held;
        at++;
        s = vm_case_holds(&scope, &at, &held);
    }
    return s;
}

static vm_status read_size(vm_program *p, char *line) {
    const int64_t zeros[VM_PROGRAM_NAMES] = {0};
    int64_t value;
    vm_status s = vm_polynomial(&(vm_scope){p->names, p->name, zeros}, line, &value);
    if (!s) s = grow(&p->size, p->count[SIZES], sizeof *p->size);
    if (!s) p->size[p->count[SIZES]++] = line;
    return s;
}

/* A dtype and the indices of so many sizes. */
static bool read_question(vm_program *p, const char **at, question *q, size_t sizes) {
    const vm_word w = vm_next_word(at);
    q->dtype = dtype_of(w);
    bool good = q->dtype >= 0 || vm_word_is(w, "run");
    for (size_t i = 0; i < sizes; i++) good = good && to_index(p, vm_next_word(at), SIZES, &q->size[i]);
    return good;
}

static bool read_flag(const char **at, bool *out) {
    const vm_word w = vm_next_word(at);
    *out = vm_word_is(w, "1");
    return *out || vm_word_is(w, "0");
}

static vm_status read_conv(vm_program *p, char *line) {
    const char *at = line;
    question q = {0};
    const bool good = read_question(p, &at, &q, 8);
    const vm_word layout = vm_next_word(&at);
    q.nhwc = vm_word_is(layout, "nhwc");
    if (!good || *at || !(q.nhwc || vm_word_is(layout, "nchw")))
        return bad("a convolution: a dtype, 8 sizes and a layout");
    vm_status s = grow(&p->conv, p->count[CONVS], sizeof *p->conv);
    if (!s) p->conv[p->count[CONVS]++] = q;
    return s;
}

static vm_status read_attention(vm_program *p, char *line) {
    const char *at = line;
    question q = {0};
    bool good = read_question(p, &at, &q, 7) && read_flag(&at, &q.causal) && read_flag(&at, &q.grouped);
    q.masked = good && *at;
    for (size_t i = 7; q.masked && i < 9; i++) good = good && to_index(p, vm_next_word(&at), SIZES, &q.size[i]);
    good = good && (!q.masked || read_flag(&at, &q.boolean));
    if (!good || *at) return bad("an attention: a dtype, 7 sizes, two flags, and of a mask 2 sizes and a flag");
    vm_status s = grow(&p->attention, p->count[ATTENTIONS], sizeof *p->attention);
    if (!s) p->attention[p->count[ATTENTIONS]++] = q;
    return s;
}

/* One word, which ends with 0. */
static bool read_step(vm_program *p, char *text, step *out) {
    char *equals = strchr(text, '=');
    if (equals) {
        *equals = 0;
        *out = (step){'=', 0, text};
        return to_index(p, (vm_word){equals + 1, strlen(equals + 1)}, MODULES, &out->number);
    }
    const size_t digits = strcspn(text + 1, ":");
    const vm_word number = {text + 1, digits};
    int64_t ago;
    *out = (step){*text, 0, text[1 + digits] ? text + 2 + digits : ""};
    if (*text == '-') {
        if (!vm_word_number(number, &ago) || ago < 1 || ago > VM_TRACE_STEPS) return false;
        out->number = (uint32_t)ago;
        return true;
    }
    if (!strchr("+cabl", *text)) return false;
    return to_index(p, number, *text == 'c' ? CONVS : *text == 'a' ? ATTENTIONS : SIZES, &out->number);
}

/* What a step adds to its module's call; false where that gets too much. */
static bool count_step(const vm_program *p, const recorded *c, const step *s, module *m) {
    m->plays++;
    if (s->kind == '+' || s->kind == 'a') m->takes++;
    if (s->kind == '-' && s->number > m->takes) m->reach = VM_MAX(m->reach, s->number - m->takes);
    if (s->kind != '=') return true;
    const module *child = &p->module[c->own[MODULES].first + s->number];
    if (child->reach > m->takes) m->reach = VM_MAX(m->reach, child->reach - m->takes);
    m->takes += child->takes;
    m->plays += child->plays;
    m->depth = VM_MAX(m->depth, child->depth + 1);
    m->path = VM_MAX(m->path, strlen(s->name) + 1 + child->path);
    return m->plays <= VM_TRACE_STEPS && m->depth < VM_PROGRAM_DEPTH && m->path < VM_PROGRAM_PATH;
}

static vm_status read_module(vm_program *p, char *line) {
    module m = {.first = p->steps};
    vm_status s = VM_OK;
    for (char *at = line; !s && *at;) {
        char *text = at;
        at += strcspn(at, " ");
        if (*at) *at++ = 0;
        step one;
        if (!*text || !read_step(p, text, &one)) return bad("words of what there is, such as +3 -1 c0 conv1=12");
        if (!count_step(p, &p->call[p->calls - 1], &one, &m)) return bad("at most 2^22 steps, 64 calls deep");
        s = grow(&p->step, p->steps, sizeof *p->step);
        if (!s) p->step[p->steps++] = one;
    }
    m.steps = p->steps - m.first;
    if (!s) s = grow(&p->module, p->count[MODULES], sizeof *p->module);
    if (!s) p->module[p->count[MODULES]++] = m;
    return s;
}

static vm_status read_line(vm_program *p, char *line) {
    static const struct {
        const char *kind;
        int list; /* of a call; -1: before the first one, -2: a call itself */
        vm_status (*read)(vm_program *p, char *line);
    } kinds[] = {{"variables", -1, read_variables}, {"derived", -1, read_derived},
                 {"call", -2, read_call},           {"size", SIZES, read_size},
                 {"conv", CONVS, read_conv},        {"attention", ATTENTIONS, read_attention},
                 {"module", MODULES, read_module}};
    const char *at = line;
    const vm_word kind = vm_next_word(&at);
    char *rest = line + kind.length + (line[kind.length] == ' ');
    if (vm_word_is(kind, "name")) {
        p->title = rest;
        return VM_OK;
    }
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const int list = kinds[i].list;
        if (!vm_word_is(kind, kinds[i].kind)) continue;
        if (list == -1 ? p->calls > 0 : list >= 0 && !p->calls) break;
        vm_status s = kinds[i].read(p, rest);
        if (!s && list >= 0) own(p, list)->count = p->count[list] - own(p, list)->first;
        return s;
    }
    return bad("variables, derived, and behind each call its size, conv, attention and module");
}

/* The outermost module of each call gives back nothing that was there before it. */
static vm_status check_calls(const vm_program *p) {
    for (size_t i = 0; i < p->calls; i++) {
        const span own = p->call[i].own[MODULES];
        if (!own.count || p->module[own.first + own.count - 1].reach)
            return vm_fail(VM_EINVAL, "program: want calls with modules that give back what they took, got another");
    }
    return VM_OK;
}

vm_status vm_program_read(const char *text, vm_program **out) {
    vm_program *p;
    *out = NULL;
    vm_status s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, sizeof *p, (void **)&p);
    if (s) return s;
    p->title = "";
    p->length = strlen(text) + 1;
    s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, p->length, (void **)&p->text);
    if (!s) memcpy(p->text, text, p->length);
    size_t number = 1;
    for (char *line = p->text, *end; !s && *line; line = end, number++) {
        end = line + strcspn(line, "\n");
        if (*end) *end++ = 0;
        s = read_line(p, line);
        if (s == VM_EINVAL || s == VM_EOVERFLOW) {
            char said[VM_SENTENCE];
            snprintf(said, sizeof said, "%s", vm_error());
            vm_fail(s, "program: line %zu: %s", number, said);
        }
    }
    if (!s) s = check_calls(p);
    if (s)
        vm_program_free(p);
    else
        *out = p;
    return s;
}

static void release(void *array, size_t count, size_t item) {
    vm_mem_free(vm_mem_common, VM_SCRATCH, array, vm_mem_capacity(count) * item);
}

void vm_program_free(vm_program *p) {
    if (!p) return;
    release(p->call, p->calls, sizeof *p->call);
    release(p->step, p->steps, sizeof *p->step);
    release(p->size, p->count[SIZES], sizeof *p->size);
    release(p->conv, p->count[CONVS], sizeof *p->conv);
    release(p->attention, p->count[ATTENTIONS], sizeof *p->attention);
    release(p->module, p->count[MODULES], sizeof *p->module);
    vm_mem_free(vm_mem_common, VM_SCRATCH, p->text, p->length);
    vm_mem_free(vm_mem_common, VM_SCRATCH, p, sizeof *p);
}

/* ---- variables and cases ---- */

size_t vm_program_given(const vm_program *p) { return p->given; }
size_t vm_program_variables(const vm_program *p) { return p->names; }
const char *vm_program_variable(const vm_program *p, size_t i) { return p->name[i]; }

static bool is_recorded_in(const recorded *c, vm_dtype dtype) {
    const char *at = c->dtypes;
    for (vm_word w; (w = vm_next_word(&at)).length;)
        if (dtype_of(w) == (int)dtype) return true;
    return false;
}

bool vm_program_has(const vm_program *p, vm_dtype dtype) {
    for (size_t i = 0; i < p->calls; i++)
        if (is_recorded_in(&p->call[i], dtype)) return true;
    return false;
}

vm_status vm_program_derive(const vm_program *p, int64_t value[VM_PROGRAM_NAMES]) {
    for (size_t i = p->given; i < p->names; i++) {
        const derived *d = &p->follows[i];
        int64_t of;
        vm_status s = vm_polynomial(&(vm_scope){i, p->name, value}, d->polynomial, &of);
        if (s) return s;
        if (of < 0) return vm_fail(VM_EINVAL, "%s: want sizes of 0 or more, got %s below", p->title, p->name[i]);
        if (__builtin_mul_overflow(of / d->by + (of % d->by > 0), d->to, &value[i]))
            return vm_fail(VM_EOVERFLOW, "%s: want sizes below 2^63, got more for %s", p->title, p->name[i]);
    }
    return VM_OK;
}

/* Whether all cases of a call do. */
static vm_status all_hold(const recorded *c, const vm_scope *scope, bool *out) {
    const char *at = c->cases;
    vm_status s = VM_OK;
    for (*out = true; !s && *out && *at; at += *at == ';') s = vm_case_holds(scope, &at, out);
    return s;
}

enum { CASES = 64 }; /* are looked at for a message */

/* The distinct cases of all calls in a dtype, the first ones. */
static size_t distinct_cases(const vm_program *p, vm_dtype dtype, vm_word found[CASES]) {
    size_t count = 0;
    for (size_t i = 0; i < p->calls; i++) {
        if (!is_recorded_in(&p->call[i], dtype)) continue;
        for (const char *at = p->call[i].cases; *at;) {
            at += strspn(at, " ;");
            const vm_word w = {at, strcspn(at, ";")};
            at += w.length;
            size_t k = 0;
            while (k < count && (found[k].length != w.length || memcmp(found[k].at, w.at, w.length))) k++;
            if (k == count && k < CASES && w.length) found[count++] = w;
        }
    }
    return count;
}

static size_t left_side(vm_word w) {
    size_t length = 0;
    while (length < w.length && w.at[length] != '=') length++;
    return length - (length && w.at[length - 1] == '!');
}

static bool same_left(vm_word a, vm_word b) {
    const size_t length = left_side(a);
    return length == left_side(b) && !memcmp(a.at, b.at, length);
}

/* Appends a case without its factors of 1: "n = 1", "h = 2 h1". */
static void append_case(char *text, size_t size, vm_word w) {
    const char *at = w.at;
    bool first = true;
    while (at < w.at + w.length) {
        const vm_word part = vm_next_word(&at);
        const bool one = vm_word_is(part, "1") && *at == ' ' && at[1] >= 'a' && at[1] <= 'z';
        const size_t used = strlen(text);
        if (!one && part.length)
            snprintf(text + used, size - used, "%s%.*s", first ? "" : " ", (int)part.length, part.at);
        first = first && one;
    }
}

/* Which cases were recorded, of those whose left sides meet none. */
static vm_status not_recorded(const vm_program *p, vm_dtype dtype, const vm_scope *scope) {
    vm_word found[CASES];
    const size_t count = distinct_cases(p, dtype, found);
    char text[VM_SENTENCE] = "", got[VM_SENTENCE] = "";
    bool met[CASES], all_met = true;
    for (size_t i = 0; i < count; i++) {
        met[i] = false;
        for (size_t k = 0; k < count && !met[i]; k++) {
            const char *at = found[k].at;
            if (same_left(found[i], found[k]) && vm_case_holds(scope, &at, &met[i])) return VM_EOVERFLOW;
        }
        all_met = all_met && met[i];
    }
    for (size_t i = 0; i < count; i++) {
        bool again = met[i] && !all_met;
        for (size_t k = 0; k < i; k++) again = again || same_left(found[i], found[k]);
        for (size_t k = i, first = 1; k < count && !again; k++) {
            if (!same_left(found[i], found[k])) continue;
            const size_t used = strlen(text);
            snprintf(text + used, sizeof text - used, "%s", !first ? " or " : used ? ", and " : "");
            append_case(text, sizeof text, found[k]);
            first = 0;
        }
    }
    for (size_t i = 0; i < p->given; i++) {
        const size_t used = strlen(got);
        snprintf(got + used, sizeof got - used, "%s%s = %lld", i ? ", " : "", p->name[i], (long long)scope->value[i]);
    }
    return vm_fail(VM_EINVAL, "%s: want a case that was recorded, %s, got %s", p->title, text, got);
}

/* ---- playing ---- */

typedef struct player {
    const vm_program *p;
    const vm_program_call *asked;
    const recorded *call;
    int64_t *size; /* [sizes of the call] */
    vm_trace *t;
    uint32_t *id; /* of what was taken, in order */
    size_t taken;
    const vm_passing **passing; /* sorted by module */
} player;

/* Chooses the call, and evaluates its sizes. */
static vm_status prepare(player *y, const vm_program *p, const vm_program_call *asked) {
    int64_t value[VM_PROGRAM_NAMES];
    const vm_scope scope = {p->names, p->name, value};
    memcpy(value, asked->value, sizeof value);
    vm_status s = vm_program_derive(p, value);
    if (s) return s;
    *y = (player){.p = p, .asked = asked};
    if (!vm_program_has(p, asked->dtype))
        return vm_fail(VM_EINVAL, "dtype: want one that %s was recorded in, got %s", p->title,
                       vm_dtype_name(asked->dtype));
    for (size_t i = 0; !y->call && i < p->calls; i++) {
        bool held = false;
        if (is_recorded_in(&p->call[i], asked->dtype) && (s = all_hold(&p->call[i], &scope, &held))) return s;
        if (held) y->call = &p->call[i];
    }
    if (!y->call) return not_recorded(p, asked->dtype, &scope);
    const span sizes = y->call->own[SIZES];
    s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, (sizes.count + 1) * sizeof *y->size, (void **)&y->size);
    for (size_t i = 0; !s && i < sizes.count; i++) {
        s = vm_polynomial(&scope, p->size[sizes.first + i], &y->size[i]);
        if (!s && y->size[i] < 0)
            s = vm_fail(VM_EINVAL, "%s: want sizes of 0 or more, got %lld of %.60s", p->title, (long long)y->size[i],
                        p->size[sizes.first + i]);
    }
    return s;
}

static const module *outermost(const player *y) {
    const span own = y->call->own[MODULES];
    return &y->p->module[own.first + own.count - 1];
}

static void finish(player *y) {
    if (!y->call) return;
    vm_mem_free(vm_mem_common, VM_SCRATCH, y->size, (y->call->own[SIZES].count + 1) * sizeof *y->size);
    vm_mem_free(vm_mem_common, VM_SCRATCH, y->id, (outermost(y)->takes + 1) * sizeof *y->id);
    vm_mem_free(vm_mem_common, VM_SCRATCH, y->passing, (y->asked->passings + 1) * sizeof *y->passing);
}

static vm_dtype dtype_in(const player *y, const question *q) {
    return q->dtype < 0 ? y->asked->dtype : (vm_dtype)q->dtype;
}

static const question *conv_of(const player *y, uint32_t number) {
    return &y->p->conv[y->call->own[CONVS].first + number];
}

static vm_conv to_conv(const player *y, const question *q) {
    int64_t n[8];
    for (int i = 0; i < 8; i++) n[i] = y->size[q->size[i]];
    vm_conv conv = vm_conv_square(dtype_in(y, q), n, n[4], n[5], n[6], n[7]);
    conv.tf32 = true;
    conv.nhwc = q->nhwc;
    return conv;
}

static vm_sdpa to_sdpa(const player *y, uint32_t number) {
    const question *q = &y->p->attention[y->call->own[ATTENTIONS].first + number];
    size_t n[9] = {0};
    for (int i = 0; i < (q->masked ? 9 : 7); i++) n[i] = (size_t)y->size[q->size[i]];
    return (vm_sdpa){.dtype = dtype_in(y, q),
                     .q = {4, n[0], n[1], n[3], n[5], false},
                     .k = {4, n[0], n[2], n[4], n[5], false},
                     .v = {4, n[0], n[2], n[4], n[6], false},
                     .masked = q->masked,
                     .boolean = q->boolean,
                     .causal = q->causal,
                     .grouped = q->grouped,
                     .mask = n[7],
                     .mask_row = n[8]};
}

static vm_status attend(player *y, uint32_t number, const char *shown) {
    static const vm_attention_kernel fused[] = {VM_ATTENTION_FLASH, VM_ATTENTION_EFFICIENT, VM_ATTENTION_MATH};
    const vm_program_call *asked = y->asked;
    const vm_sdpa call = to_sdpa(y, number);
    vm_attention_kernel kernel;
    vm_status s = vm_sdpa_choose(&call, asked->gpu.sm, fused, 3, &kernel);
    if (!s && kernel == VM_ATTENTION_MATH)
        s = vm_fail(VM_EINVAL,
                    "%s: want attention by one of PyTorch's fused kernels, the only ones that were recorded, got %s on "
                    "%s, where PyTorch writes out all scores",
                    shown, vm_dtype_name(call.dtype), asked->gpu_name);
    if (!s) s = vm_trace_fused(y->t, &call, kernel, &asked->gpu, shown, &y->id[y->taken]);
    y->taken += !s;
    return s;
}

/* The first of the tensors that pass through a module's call. */
static size_t first_passing(const player *y, const char *path) {
    size_t low = 0, high = y->asked->passings;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (strcmp(y->passing[middle]->module, path) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Takes what passes through a module's call; their ids follow one another. */
static vm_status bring(player *y, const char *path, const char *shown, uint32_t *count) {
    vm_status s = VM_OK;
    for (size_t i = first_passing(y, path); !s && i < y->asked->passings; i++) {
        const vm_passing *one = y->passing[i];
        if (strcmp(one->module, path)) break;
        char label[VM_PROGRAM_PATH + 16], text[VM_TRACE_LABEL];
        uint32_t id;
        snprintf(label, sizeof label, "weights of %.*s", VM_PROGRAM_PATH, shown);
        vm_trace_label(text, label, one->name);
        s = one->sent ? vm_trace_send(y->t, one->bytes, text, &id) : vm_trace_take(y->t, one->bytes, text, &id);
        *count += !s;
    }
    return s;
}

static vm_status play(player *y, uint32_t index, const char *path, const char *shown);

/* The call of a submodule: of `path`, which is NULL for the caller of the outermost. */
static vm_status play_child(player *y, const step *one, const char *path, const char *shown) {
    char inner[VM_PROGRAM_PATH];
    const bool is_absolute = *one->name == '/';
    if (path && *path && !is_absolute)
        snprintf(inner, sizeof inner, "%s.%s", path, one->name);
    else
        snprintf(inner, sizeof inner, "%s", one->name + is_absolute);
    return play(y, one->number, inner, *inner ? inner : shown);
}

static vm_status play_step(player *y, const step *one, const char *path, const char *shown) {
    char text[VM_TRACE_LABEL];
    vm_status s;
    switch (one->kind) {
    case '=':
        return play_child(y, one, path, shown);
    case '+':
        s = vm_trace_take(y->t, (uint64_t)y->size[one->number], vm_trace_label(text, shown, one->name),
                          &y->id[y->taken]);
        y->taken += !s;
        return s;
    case '-':
        return vm_trace_give(y->t, y->id[y->taken - one->number]);
    case 'c': {
        const vm_conv conv = to_conv(y, conv_of(y, one->number));
        return vm_trace_conv(y->t, &conv, vm_trace_label(text, shown, "workspace"));
    }
    case 'a':
        return attend(y, one->number, shown);
    case 'l':
        vm_trace_count(y->t, (uint64_t)y->size[one->number]);
        return vm_trace_blas(y->t, VM_TRACE_CUBLASLT, vm_trace_label(text, shown, "workspace"));
    default:
        vm_trace_count(y->t, (uint64_t)y->size[one->number]);
        return vm_trace_blas(y->t, VM_TRACE_CUBLAS, shown);
    }
}

/* What a module says: a call of `path`, "" for the outermost and NULL for what calls that. */
static vm_status play(player *y, uint32_t index, const char *path, const char *shown) {
    const module *m = &y->p->module[y->call->own[MODULES].first + index];
    const uint32_t first = y->t->ids;
    uint32_t held = 0;
    vm_status s = path ? bring(y, path, shown, &held) : VM_OK;
    for (size_t i = 0; !s && i < m->steps; i++) s = play_step(y, &y->p->step[m->first + i], path, shown);
    while (!s && held) s = vm_trace_give(y->t, first + --held);
    return s;
}

static int by_module(const void *a, const void *b) {
    const vm_passing *x = *(const vm_passing *const *)a, *y = *(const vm_passing *const *)b;
    const int order = strcmp(x->module, y->module);
    if (order || x == y) return order;
    return x->sent != y->sent ? y->sent - x->sent : x < y ? -1 : 1;
}

vm_status vm_program_trace(const vm_program *p, const vm_program_call *call, vm_trace **out) {
    player y = {0};
    *out = NULL;
    vm_status s = prepare(&y, p, call);
    if (!s) s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, (outermost(&y)->takes + 1) * sizeof *y.id, (void **)&y.id);
    if (!s) s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, (call->passings + 1) * sizeof *y.passing, (void **)&y.passing);
    if (!s) s = vm_trace_new(&y.t);
    if (!s) {
        for (size_t i = 0; i < call->passings; i++) y.passing[i] = &call->passing[i];
        qsort(y.passing, call->passings, sizeof *y.passing, by_module);
        s = play(&y, (uint32_t)(y.call->own[MODULES].count - 1), NULL, p->title);
    }
    finish(&y);
    if (s)
        vm_trace_free(y.t);
    else
        *out = y.t;
    return s;
}
