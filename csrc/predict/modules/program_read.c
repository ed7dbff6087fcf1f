/* Reads programs. Polynomials stay text; words become steps. */
#include <stdio.h>
#include <string.h>

#include "program_parts.h"

static const int64_t zeros[VM_PROGRAM_NAMES];

static int dtype_of(vm_word w) {
    for (int d = VM_F32; d <= VM_BF16; d++)
        if (vm_word_is(w, vm_dtype_name((vm_dtype)d))) return d;
    return -1;
}

static span *own(vm_program *p, int list) { return &p->call[p->calls - 1].own[list]; }

static vm_status bad(const char *want) { return vm_fail(VM_EINVAL, VM_EXPECTED("", "%s", ""), want); }

/* Parses an index into one of the call's lists. */
static bool to_index(vm_program *p, vm_word w, int list, uint32_t *out) {
    int64_t number;
    if (!vm_to_number(w, &number) || number < 0 || (uint64_t)number >= own(p, list)->count) return false;
    *out = (uint32_t)number;
    return true;
}

static vm_status add_name(vm_program *p, const char *name) {
    if (p->names == VM_PROGRAM_NAMES) return bad("at most 64 variables");
    p->name[p->names++] = name;
    return VM_OK;
}

/* Ends a line's first word with 0. Returns: the text after it. */
static char *cut(char *line) {
    char *end = line + strcspn(line, " ");
    if (*end) *end++ = 0;
    return end;
}

static vm_status read_variables(vm_program *p, char *line) {
    vm_status s = VM_OK;
    for (char *next; !s && *line; line = next) {
        next = cut(line);
        s = add_name(p, line);
    }
    p->given = p->names;
    return s;
}

/* VM_EINVAL if the polynomial uses an unknown variable. */
static vm_status check_polynomial(const vm_program *p, const char *text) {
    int64_t value;
    return vm_evaluate(&(vm_scope){p->names, p->name, zeros}, text, &value);
}

static vm_status read_derived(vm_program *p, char *line) {
    const char *at = cut(line);
    derived d;
    if (!vm_to_number(vm_next_word(&at), &d.by) || !vm_to_number(vm_next_word(&at), &d.to) || d.by < 1 || d.to < 1)
        return bad("a name, two numbers of 1 or more, and a polynomial");
    d.polynomial = at;
    vm_status s;
    if ((s = check_polynomial(p, at))) return s;
    if ((s = add_name(p, line))) return s;
    p->follows[p->names - 1] = d;
    return VM_OK;
}

static vm_status read_call(vm_program *p, char *line) {
    vm_status s = vm_scratch_grow(&p->call, p->calls, sizeof *p->call);
    if (s) return s;
    recorded *c = &p->call[p->calls++];
    *c = (recorded){.cases = ""};
    for (int list = 0; list < LISTS; list++) c->own[list].first = p->count[list];
    const char *at = line;
    for (vm_word w; (w = vm_next_word(&at)).length;) {
        const int dtype = dtype_of(w);
        if (dtype < 0) return bad("dtypes, and cases behind semicolons");
        c->dtypes |= 1u << dtype;
    }
    if (*at) c->cases = at + 1;
    bool held;
    return vm_all_hold(&(vm_scope){p->names, p->name, zeros}, c->cases, &held);
}

static vm_status read_size(vm_program *p, char *line) {
    vm_status s;
    if ((s = check_polynomial(p, line))) return s;
    if ((s = vm_scratch_grow(&p->size, p->count[SIZES], sizeof *p->size))) return s;
    p->size[p->count[SIZES]++] = line;
    return VM_OK;
}

/* Reads a dtype, the indices of `sizes` sizes, and `flags` flags. */
static vm_status read_question(vm_program *p, const char *at, int list, size_t sizes, size_t flags) {
    question q = {.sizes = sizes};
    vm_word w = vm_next_word(&at);
    q.dtype = dtype_of(w);
    bool good = q.dtype >= 0 || vm_word_is(w, "run");
    for (size_t i = 0; i < sizes; i++) good = good && to_index(p, vm_next_word(&at), SIZES, &q.size[i]);
    for (size_t i = 0; i < flags; i++) {
        w = vm_next_word(&at);
        q.flag[i] = vm_word_is(w, "1");
        good = good && (q.flag[i] || vm_word_is(w, "0"));
    }
    if (!good || *at) return vm_fail(VM_EINVAL, VM_EXPECTED("", "a dtype, %zu sizes and %zu flags", ""), sizes, flags);
    vm_status s = vm_scratch_grow(&p->question[list], p->count[list], sizeof q);
    if (!s) p->question[list][p->count[list]++] = q;
    return s;
}

static vm_status read_conv(vm_program *p, char *line) { return read_question(p, line, CONVS, OF_SQUARE, 1); }

static vm_status read_conv3(vm_program *p, char *line) { return read_question(p, line, CONVS, OF_FRAMES, 1); }

static vm_status read_convolution(vm_program *p, char *line) { return read_question(p, line, CONVS, OF_GENERAL, 3); }

static vm_status read_attention(vm_program *p, char *line) {
    return read_question(p, line, ATTENTIONS, OF_ATTENTION, 7);
}

/* Reads one word, which ends with 0. */
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
        if (!vm_to_number(number, &ago) || ago < 1 || ago > VM_TRACE_STEPS) return false;
        out->number = (uint32_t)ago;
        return true;
    }
    if (!strchr("+cabl", *text)) return false;
    return to_index(p, number, *text == 'c' ? CONVS : *text == 'a' ? ATTENTIONS : SIZES, &out->number);
}

/* Adds a step to its module's counts; false if they get too large. */
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
    vm_status s;
    for (char *next; *line; line = next) {
        step one;
        next = cut(line);
        if (!*line || !read_step(p, line, &one)) return bad("words of what there is, such as +3 -1 c0 conv1=12");
        if (!count_step(p, &p->call[p->calls - 1], &one, &m)) return bad("at most 2^22 steps, 64 calls deep");
        if ((s = vm_scratch_grow(&p->step, p->steps, sizeof *p->step))) return s;
        p->step[p->steps++] = one;
    }
    m.steps = p->steps - m.first;
    if ((s = vm_scratch_grow(&p->module, p->count[MODULES], sizeof *p->module))) return s;
    p->module[p->count[MODULES]++] = m;
    return VM_OK;
}

static vm_status read_line(vm_program *p, char *line) {
    static const struct {
        const char *kind;
        int list; /* of a call; -1: before the first call, -2: a call itself */
        vm_status (*read)(vm_program *p, char *line);
    } kinds[] = {{"variables", -1, read_variables},
                 {"derived", -1, read_derived},
                 {"call", -2, read_call},
                 {"size", SIZES, read_size},
                 {"conv", CONVS, read_conv},
                 {"conv3", CONVS, read_conv3},
                 {"module", MODULES, read_module},
                 {"convolution", CONVS, read_convolution},
                 {"attention", ATTENTIONS, read_attention}};
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

/* Checks that the outermost module of each call gives back nothing from before it. */
static vm_status check_calls(const vm_program *p) {
    for (size_t i = 0; i < p->calls; i++) {
        const span own = p->call[i].own[MODULES];
        if (!own.count || p->module[own.first + own.count - 1].reach)
            return vm_fail(VM_EINVAL,
                           VM_EXPECTED("program", "calls with modules that give back what they took", "another"));
    }
    return VM_OK;
}

vm_status vm_program_read(const char *text, vm_program **out) {
    vm_program *p;
    *out = NULL;
    vm_status s;
    if ((s = vm_scratch_new(1, sizeof *p, &p))) return s;
    p->title = "";
    if ((s = vm_scratch_new(strlen(text) + 1, 1, &p->text))) goto done;
    strcpy(p->text, text);
    size_t number = 1;
    for (char *line = p->text, *end; *line; line = end, number++) {
        end = line + strcspn(line, "\n");
        if (*end) *end++ = 0;
        s = read_line(p, line);
        if (s == VM_EINVAL || s == VM_EOVERFLOW) {
            char said[VM_SENTENCE];
            snprintf(said, sizeof said, "%s", vm_error());
            vm_fail(s, "program: line %zu: %s", number, said);
        }
        if (s) goto done;
    }
    s = check_calls(p);
done:
    if (s)
        vm_program_free(p);
    else
        *out = p;
    return s;
}

void vm_program_free(vm_program *p) {
    if (!p) return;
    vm_scratch_free(p->call);
    vm_scratch_free(p->step);
    vm_scratch_free(p->size);
    for (int list = CONVS; list <= ATTENTIONS; list++) vm_scratch_free(p->question[list]);
    vm_scratch_free(p->module);
    vm_scratch_free(p->text);
    vm_scratch_free(p);
}
