/* Plays programs. */
#include <stdio.h>
#include <string.h>

#include "program_parts.h"

/* ---- variables and cases ---- */

size_t vm_program_given(const vm_program *p) { return p->given; }

/* Fills the derived variables of `value` from the given ones. */
static vm_status derive(const vm_program *p, int64_t value[VM_PROGRAM_NAMES]) {
    for (size_t i = p->given; i < p->names; i++) {
        const derived *d = &p->follows[i];
        int64_t of;
        vm_status s = vm_evaluate(&(vm_scope){i, p->name, value}, d->polynomial, &of);
        if (s) return s;
        if (of < 0)
            return vm_fail(VM_EINVAL, VM_EXPECTED("%s", "sizes of 0 or more", "less as %s"), p->title, p->name[i]);
        if (__builtin_mul_overflow(of / d->by + (of % d->by > 0), d->to, &value[i]))
            return vm_fail(VM_EOVERFLOW, "%s: expected sizes below 2^63, got more for %s", p->title, p->name[i]);
    }
    return VM_OK;
}

enum { CASES = 64 }; /* most cases compared for a message */

/* Returns: whether two cases are equal up to one of the characters `ends`. */
static bool same_to(const char *ends, const char *a, const char *b) {
    const size_t length = strcspn(a, ends);
    return length == strcspn(b, ends) && !memcmp(a, b, length);
}

/* Finds the first distinct cases of all calls in a dtype. */
static size_t distinct_cases(const vm_program *p, vm_dtype dtype, const char *found[CASES]) {
    size_t count = 0;
    for (size_t i = 0; i < p->calls; i++) {
        const char *at = p->call[i].dtypes >> dtype & 1 ? p->call[i].cases : "";
        for (; *(at += strspn(at, " ;")); at += strcspn(at, ";")) {
            size_t k = 0;
            while (k < count && !same_to(";", found[k], at)) k++;
            if (k == count && k < CASES) found[count++] = at;
        }
    }
    return count;
}

static void append(char text[VM_SENTENCE], const char *between, const char *more) {
    const char *const pieces[] = {*text ? between : "", more};
    size_t at = strlen(text);
    for (int i = 0; i < 2; i++)
        for (const char *c = pieces[i]; *c && at + 1 < VM_SENTENCE; c++) text[at++] = *c;
    text[at] = 0;
}

/* Appends a case without its factors of 1: "n = 1", "h = 2 h1". */
static void append_case(char text[VM_SENTENCE], const char *one) {
    char plain[VM_SENTENCE];
    size_t length = 0;
    for (const char *at = one; *at && *at != ';' && length + 1 < sizeof plain; at++) {
        const bool is_factor = !strncmp(at, "1 ", 2) && at[2] >= 'a' && at[2] <= 'z' && (at == one || at[-1] == ' ');
        if (is_factor)
            at++; /* with its space */
        else
            plain[length++] = *at;
    }
    plain[length] = 0;
    append(text, " or ", plain);
}

/* Reports which cases were recorded, among those whose left sides meet none. */
static vm_status not_recorded(const vm_program *p, vm_dtype dtype, const vm_scope *known) {
    const char *found[CASES];
    const size_t count = distinct_cases(p, dtype, found);
    char all[VM_SENTENCE] = "", unmet[VM_SENTENCE] = "", got[VM_SENTENCE] = "";
    for (size_t i = 0, k; i < count; i++) {
        char alike[VM_SENTENCE] = "";
        bool met = false, held;
        for (k = 0; k < i && !same_to("!=", found[i], found[k]);) k++;
        if (k < i) continue; /* reported with that one */
        for (; k < count; k++) {
            const char *at = found[k];
            if (!same_to("!=", found[i], at)) continue;
            append_case(alike, at);
            if (vm_case_holds(known, &at, &held)) return VM_EOVERFLOW;
            met |= held;
        }
        append(all, ", and ", alike);
        if (!met) append(unmet, ", and ", alike);
    }
    for (size_t i = 0; i < p->given; i++) {
        char one[VM_SENTENCE];
        snprintf(one, sizeof one, "%s = %lld", p->name[i], (long long)known->value[i]);
        append(got, ", ", one);
    }
    return vm_fail(VM_EINVAL, VM_EXPECTED("%s", "a case that was recorded, %s", "%s"), p->title, *unmet ? unmet : all,
                   got);
}

/* ---- playing ---- */

typedef struct player {
    const vm_program *p;
    const vm_program_call *asked;
    const recorded *call;
    int64_t *size; /* [sizes of the call] */
    vm_trace *t;
    uint32_t *id; /* of the storages taken, in order */
    size_t taken;
    vm_passage through;
} player;

/* Chooses the call, and evaluates its sizes. */
static vm_status prepare(player *y, const vm_program *p, const vm_program_call *asked) {
    int64_t value[VM_PROGRAM_NAMES];
    const vm_scope known = {p->names, p->name, value};
    bool has_dtype = false;
    memcpy(value, asked->value, sizeof value);
    vm_status s = derive(p, value);
    if (s) return s;
    *y = (player){.p = p, .asked = asked};
    for (size_t i = 0; !y->call && i < p->calls; i++) {
        bool held;
        if (!(p->call[i].dtypes >> asked->dtype & 1)) continue;
        has_dtype = true;
        if ((s = vm_all_hold(&known, p->call[i].cases, &held))) return s;
        if (held) y->call = &p->call[i];
    }
    if (!has_dtype)
        return vm_fail(VM_EINVAL, VM_EXPECTED("dtype", "one that %s was recorded in", "%s"), p->title,
                       vm_dtype_name(asked->dtype));
    if (!y->call) return not_recorded(p, asked->dtype, &known);
    const span sizes = y->call->own[SIZES];
    if ((s = vm_scratch_new(sizes.count, sizeof *y->size, &y->size))) return s;
    for (size_t i = 0; i < sizes.count; i++) {
        if ((s = vm_evaluate(&known, p->size[sizes.first + i], &y->size[i]))) return s;
        if (y->size[i] < 0)
            return vm_fail(VM_EINVAL, VM_EXPECTED("%s", "sizes of 0 or more", "%lld of %.60s"), p->title,
                           (long long)y->size[i], p->size[sizes.first + i]);
    }
    return VM_OK;
}

static const module *outermost(const player *y) {
    const span own = y->call->own[MODULES];
    return &y->p->module[own.first + own.count - 1];
}

/* Looks up a question and its sizes. Returns: its dtype. */
static vm_dtype look_up(const player *y, int list, uint32_t number, const question **q, int64_t n[OF_GENERAL]) {
    *q = &y->p->question[list][y->call->own[list].first + number];
    for (size_t i = 0; i < (*q)->sizes; i++) n[i] = y->size[(*q)->size[i]];
    return (*q)->dtype < 0 ? y->asked->dtype : (vm_dtype)(*q)->dtype;
}

/* n: batch, channels of input and output, groups; then depth, height and width of each of these: input, filter, stride,
 * padding, dilation, output padding. */
static vm_conv to_general(vm_dtype dtype, const int64_t *n, const question *q) {
    vm_conv conv = {.dtype = dtype,
                    .transposed = q->flag[TRANSPOSED],
                    .dims = q->flag[HAS_DEPTH] ? 3 : 2,
                    .n = n[0],
                    .c = n[1],
                    .k = n[2],
                    .groups = n[3]};
    int64_t *extent[] = {conv.size, conv.filter, conv.stride, conv.padding, conv.dilation, conv.output_padding};
    for (size_t i = 0; i < sizeof extent / sizeof *extent; i++)
        for (size_t d = 0; d < VM_CONV_DIMS; d++) extent[i][d] = n[4 + i * VM_CONV_DIMS + d];
    return conv;
}

static vm_conv to_conv(const player *y, uint32_t number) {
    const question *q;
    int64_t n[OF_GENERAL] = {0};
    const vm_dtype dtype = look_up(y, CONVS, number, &q, n);
    vm_conv conv = q->sizes == OF_GENERAL ? to_general(dtype, n, q) : vm_conv_square(dtype, n, n[4], n[5], n[6], n[7]);
    conv.tf32 = true;
    conv.nhwc = q->flag[NHWC];
    if (q->sizes == OF_FRAMES) {
        conv.dims = 3;
        conv.size[0] = n[8];
    }
    return conv;
}

static vm_sdpa to_sdpa(const player *y, uint32_t number) {
    const question *q;
    int64_t of[OF_GENERAL] = {0};
    const vm_dtype dtype = look_up(y, ATTENTIONS, number, &q, of);
    uint64_t n[9];
    for (int i = 0; i < 9; i++) n[i] = (uint64_t)of[i];
    return (vm_sdpa){.dtype = dtype,
                     .q = {4, n[0], n[1], n[3], n[5], false, q->flag[4]},
                     .k = {4, n[0], n[2], n[4], n[5], false, q->flag[5]},
                     .v = {4, n[0], n[2], n[4], n[6], false, q->flag[6]},
                     .causal = q->flag[0],
                     .grouped = q->flag[1],
                     .masked = q->flag[2],
                     .boolean = q->flag[3],
                     .mask = n[7],
                     .mask_row = n[8]};
}

static vm_status attend(player *y, uint32_t number, const char *shown) {
    const vm_sdpa call = to_sdpa(y, number);
    vm_status s = vm_trace_attention(y->t, &call, VM_ATTENTION_USUAL, &y->asked->gpu, shown, &y->id[y->taken]);
    y->taken += !s;
    return s;
}

/* Returns: the FLOPs of a module's own first product. */
static uint64_t first_product(const player *y, const module *m) {
    for (size_t i = 0; i < m->steps; i++) {
        const step *one = &y->p->step[m->first + i];
        if (one->kind == 'b' || one->kind == 'l') return (uint64_t)y->size[one->number];
    }
    return 0;
}

static vm_status play(player *y, uint32_t index, const char *path, const char *shown);

/* Plays a submodule's call. path: NULL for the caller of the outermost. */
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
    case '=': return play_child(y, one, path, shown);
    case '+':
        s = vm_trace_take(y->t, (uint64_t)y->size[one->number], vm_trace_label(text, shown, one->name),
                          &y->id[y->taken]);
        y->taken += !s;
        return s;
    case '-': return vm_trace_give(y->t, y->id[y->taken - one->number]);
    case 'c': {
        const vm_conv conv = to_conv(y, one->number);
        return vm_trace_conv(y->t, &conv, vm_trace_label(text, shown, "workspace"));
    }
    case 'a': return attend(y, one->number, shown);
    case 'l':
        vm_trace_count(y->t, (uint64_t)y->size[one->number]);
        return vm_trace_blas(y->t, VM_TRACE_CUBLASLT, vm_trace_label(text, shown, "workspace"));
    default: vm_trace_count(y->t, (uint64_t)y->size[one->number]); return vm_trace_blas(y->t, VM_TRACE_CUBLAS, shown);
    }
}

/* Returns: whether a caller calls the outermost module, which has no name, rather than its submodules. */
static bool has_outermost(const player *y, const module *caller) {
    for (size_t i = 0; i < caller->steps; i++) {
        const step *one = &y->p->step[caller->first + i];
        if (one->kind == '=' && !*one->name) return true;
    }
    return false;
}

/* Finds the storage that a layer leaves, *number of those taken. Returns: its step; NULL if there is none. */
static const step *find_output(const player *y, const module *m, size_t *number) {
    const step *each = m->steps ? &y->p->step[m->first] : NULL, *found = NULL;
    for (size_t i = 0, taken = 0; i < m->steps; i++) {
        if (each[i].kind == '=' || each[i].kind == 'a') return NULL;
        if (each[i].kind != '+') continue;
        bool stays = true;
        for (size_t j = i + 1, later = ++taken; j < m->steps; j++) {
            later += each[j].kind == '+';
            stays = stays && !(each[j].kind == '-' && later - each[j].number == taken - 1);
        }
        if (stays) found = &each[i], *number = y->taken - m->takes + taken - 1;
    }
    return found;
}

/* Plays a layer's low-rank pairs. */
static vm_status play_companions(player *y, const module *m, const char *path) {
    const vm_companions *all = &y->asked->companion;
    if (!all->count) return VM_OK;
    const step *first = m->steps ? &y->p->step[m->first] : NULL, *conv = first;
    vm_status s = VM_OK;
    for (size_t i = 0, number = 0; !s && i < all->count; i++) {
        if (strcmp(all->item[i].module, path)) continue;
        const step *output = find_output(y, m, &number);
        if (!output) return vm_fail(VM_EINVAL, VM_EXPECTED("companions", "a layer's name", "%s"), path);
        while (conv < first + m->steps && conv->kind != 'c') conv++;
        const vm_conv of = conv < first + m->steps ? to_conv(y, conv->number) : (vm_conv){0};
        s = vm_companion_play(&all->item[i], &y->through, (uint64_t)y->size[output->number], first_product(y, m),
                              of.dims ? &of : NULL, &y->id[number]);
    }
    return s;
}

/* Plays a module. path: "" for the outermost, NULL for its caller. */
static vm_status play(player *y, uint32_t index, const char *path, const char *shown) {
    const module *m = &y->p->module[y->call->own[MODULES].first + index];
    if (!path && !has_outermost(y, m)) path = "";
    const uint64_t product = y->asked->passing.count ? first_product(y, m) : 0;
    vm_status s;
    if (path && (s = vm_passage_begin(&y->through, path, shown, product))) return s;
    for (size_t i = 0; i < m->steps; i++)
        if ((s = play_step(y, &y->p->step[m->first + i], path, shown))) return s;
    if (!path) return VM_OK;
    if ((s = vm_passage_end(&y->through, path))) return s;
    return play_companions(y, m, path);
}

vm_status vm_program_trace(const vm_program *p, const vm_program_call *call, vm_trace **out) {
    player y = {0};
    vm_status s;
    if ((s = prepare(&y, p, call))) goto done;
    if ((s = vm_scratch_new(outermost(&y)->takes + 1, sizeof *y.id, &y.id))) goto done;
    if ((s = vm_trace_new(&y.t))) goto done;
    if ((s = vm_passage_new(y.t, &call->passing, &y.through))) goto done;
    s = play(&y, (uint32_t)(y.call->own[MODULES].count - 1), NULL, p->title);
done:
    vm_scratch_free(y.size);
    vm_scratch_free(y.id);
    vm_passage_free(&y.through);
    if (s) vm_trace_free(y.t);
    *out = s ? NULL : y.t;
    return s;
}
