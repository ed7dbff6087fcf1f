/* Makes whole answers without Python: reads the calls that they make of the core from a file that core_calls.py writes,
 * and prints what each returns, and what verdicts follow from them. test_32bit.py builds it for addresses of 32 bits.
 *
 * A line is the name of a call and its fields, separated by tabs. A field is a text, or numbers separated by spaces.
 * Profiles, workspaces and programs count from 0 within the file; traces, processes and rows of other workspaces within
 * a question. Every line prints one line. */
#include "../csrc/predict/judge.h"
#include "../csrc/predict/process.h"
#include "../csrc/predict/program.h"
#include "../csrc/predict/workspace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CURRENT(a, kind) vm_talloc_get_stats(a)->of[kind][VM_TALLOC_ALL].current
#define PEAK(a, kind) vm_talloc_get_stats(a)->of[kind][VM_TALLOC_ALL].peak

static void stop(const char *why) {
    fprintf(stderr, "%s\n", why);
    exit(1);
}

static void *room(size_t items, size_t bytes) {
    void *made = calloc(items + 1, bytes);
    if (!made) stop("no memory");
    return made;
}

/* ---- fields ---- */

static char *at;                /* the next field; NULL behind the last */
static uint64_t *list[1 << 12]; /* the line's numbers, which go when it is done */
static size_t lists;

static char *field(void) {
    char *const text = at;
    if (!text) stop("want another field");
    char *const end = strchr(text, '\t');
    if (end) *end = 0;
    at = end ? end + 1 : NULL;
    return text;
}

/* Negative numbers come as what uint64_t makes of them. */
static uint64_t number(void) { return strtoull(field(), NULL, 10); }

static uint64_t *numbers(size_t *count) {
    char *text = field();
    size_t spaces = 0;
    for (const char *c = text; *c; c++) spaces += *c == ' ';
    if (lists == sizeof list / sizeof *list) stop("too many lists");
    uint64_t *const of = list[lists++] = room(spaces + 1, sizeof *of);
    for (*count = 0; *text; ++*count) {
        char *const begin = text;
        of[*count] = strtoull(begin, &text, 10);
        if (text == begin) stop("want numbers");
        text += *text == ' ';
    }
    return of;
}

/* At least so many. */
static const uint64_t *some(size_t want) {
    size_t count;
    const uint64_t *of = numbers(&count);
    if (count < want) stop("want more numbers");
    return of;
}

static int choose(const char *const *names, int count) {
    const char *text = field();
    for (int i = 0; i < count; i++)
        if (!strcmp(text, names[i])) return i;
    stop(text);
    return -1;
}

static vm_dtype dtype(void) {
    static const char *const names[] = {"float32", "float16", "bfloat16"};
    return (vm_dtype)choose(names, 3);
}

/* ---- what was made so far ---- */

typedef struct table {
    void *item[1 << 14];
    size_t count;
} table;

static table profiles, workspaces, programs, traces, processes, allocators, rows;

static void add(table *t, void *item) {
    if (t->count == sizeof t->item / sizeof *t->item) stop("too many");
    t->item[t->count++] = item;
}

static void *get(const table *t, size_t i) {
    if (i >= t->count) stop("want a number of something that was made");
    return t->item[i];
}

static void say(const char *what, const uint64_t *of, size_t count) {
    printf("%s", what);
    for (size_t i = 0; i < count; i++) printf(" %" PRIu64, of[i]);
}

/* What a call that makes something returns. */
static void say_made(vm_status s, table *t, void *made) {
    if (s)
        printf("error: %s", vm_error());
    else
        add(t, made);
}

static void clear(void) {
    for (size_t i = 0; i < processes.count; i++) {
        vm_process_free(processes.item[i]);
        vm_talloc_delete(allocators.item[i]);
    }
    for (size_t i = 0; i < traces.count; i++) vm_trace_free(traces.item[i]);
    for (size_t i = 0; i < rows.count; i++) free(rows.item[i]);
    processes.count = allocators.count = traces.count = rows.count = 0;
}

static void question(void) {
    clear();
    printf("%s", field());
}

/* ---- workspaces ---- */

static vm_formula to_formula(const uint64_t *of) {
    vm_formula f = {
        .index = (int64_t)of[6], .tile = (int64_t)of[7], .per_tile = (int64_t)of[8], .constant = (int64_t)of[9]};
    for (int i = 0; i < VM_TENSORS; i++) f.times[i] = (uint32_t)of[i];
    return f;
}

/* dtypes, r, stride, least, most; a formula, or zeros; pairs of channels */
static vm_rule rule(void) {
    size_t count;
    const uint64_t *of = numbers(&count);
    if (count < 16 || count > 16 + 2 * VM_RULE_PAIRS) stop("want a rule's numbers");
    vm_rule r = {(unsigned)of[0],
                 (int64_t)of[1],
                 (int64_t)of[2],
                 (int64_t)of[3],
                 (int64_t)of[4],
                 .pairs = (count - 16) / 2,
                 .formula = to_formula(of + 5),
                 .winograd = of[15]};
    for (size_t i = 16; i < count; i++) r.channels[(i - 16) / 2][i % 2] = (int64_t)of[i];
    return r;
}

static void profile(void) {
    const bool strict = number();
    const uint64_t other = number();
    size_t left, count;
    vm_profile *p;
    vm_status s = vm_profile_new(strict, other < UINT64_MAX ? get(&profiles, (size_t)other) : NULL, &p);
    for (left = (size_t)number(); !s && left; left--) {
        const uint64_t *of = numbers(&count);
        if (count && count < 10) stop("want a formula's numbers");
        const vm_formula f = count ? to_formula(of) : (vm_formula){0};
        s = vm_profile_add_formula(p, count ? &f : NULL);
        free(list[--lists]);
    }
    for (left = (size_t)number(); !s && left; left--) {
        const vm_rule r = rule();
        s = vm_profile_add_rule(p, &r);
    }
    while (!s && at) {
        const char *key = field();
        s = vm_profile_add_tree(p, key, field());
    }
    say_made(s, &profiles, p);
}

static vm_catalogue *catalogue;

/* Profiles that the catalogue loads, by its numbers. */
static struct {
    const vm_profile *profile;
    bool inferred;
} loaded[1 << 12];

static size_t loaded_number(size_t number) {
    if (number >= sizeof loaded / sizeof *loaded) stop("want a profile of the catalogue");
    return number;
}

static void load(void) {
    const uint64_t *of = some(3);
    const size_t i = loaded_number((size_t)of[0]);
    loaded[i].profile = get(&profiles, (size_t)of[1]);
    loaded[i].inferred = of[2];
}

static vm_status load_profile(void *context, size_t number, const vm_profile **profile, bool *inferred) {
    const size_t i = loaded_number(number);
    if (context || !loaded[i].profile) stop("want a profile that was loaded");
    *profile = loaded[i].profile;
    *inferred = loaded[i].inferred;
    return VM_OK;
}

static vm_card card(void) {
    vm_card c = {0};
    snprintf(c.key, sizeof c.key, "%s", field());
    const uint64_t *of = some(2);
    c.sm = (int)of[0], c.multiprocessors = (int)of[1];
    return c;
}

/* As rule(); then as, since, before, standing, and compute capabilities. */
static vm_card_rule card_rule(void) {
    vm_card_rule r = {.rule = rule()};
    size_t count;
    const uint64_t *of = numbers(&count);
    if (count < 4 || count > 4 + VM_RULE_CAPABILITIES) stop("want a rule's versions and compute capabilities");
    r.as = (int)of[0], r.since = (int)of[1], r.before = (int)of[2], r.standing = (vm_standing)of[3];
    while (r.capabilities < count - 4) {
        r.capability[r.capabilities] = (int)of[4 + r.capabilities];
        r.capabilities++;
    }
    return r;
}

static vm_status add_recorded(void) {
    const uint64_t *of = some(3);
    vm_card *cards = room((size_t)of[2], sizeof *cards);
    for (size_t i = 0; i < of[2]; i++) cards[i] = card();
    const vm_status s = vm_catalogue_add(catalogue, (int)of[0], (int)of[1], cards, (size_t)of[2]);
    free(cards);
    return s;
}

static void make_catalogue(void) {
    uint64_t left;
    if (catalogue) stop("want one catalogue");
    vm_status s = vm_catalogue_new(load_profile, NULL, &catalogue);
    for (left = number(); !s && left; left--) s = add_recorded();
    for (left = number(); !s && left; left--) {
        const vm_card_rule r = card_rule();
        s = vm_catalogue_add_rule(catalogue, &r);
    }
    for (left = number(); !s && left; left--) {
        const vm_card c = card();
        s = vm_catalogue_add_sample(catalogue, &c);
    }
    if (s) stop(vm_error());
}

static void workspace(void) {
    static const char *const guess[] = {"rule", "least", "most", "columns"};
    vm_workspace_for of = {.card = card()};
    const uint64_t *n = some(6);
    of.coarse = n[0];
    of.torch.cudnn = (int)n[1];
    of.shipped = (int)n[2];
    of.torch.release = (int)n[3];
    of.torch.is_290 = n[4];
    of.tf32 = n[5];
    of.guess = (vm_guess)choose(guess, 4);
    const size_t count = (size_t)number();
    vm_card_rule *r = room(count, sizeof *r);
    for (size_t i = 0; i < count; i++) r[i] = card_rule();
    vm_workspace *w;
    const vm_status s = vm_workspace_new(catalogue, &of, r, count, &w);
    free(r);
    say_made(s, &workspaces, w);
}

/* The convolutions of "trace", "process" or "workspace", and its number. */
static vm_conv *convs(size_t *count) {
    static const char *const kinds[] = {"trace", "process", "workspace"};
    const table *const tables[] = {&traces, &processes, &workspaces};
    const int kind = choose(kinds, 3);
    void *const of = get(tables[kind], (size_t)number());
    const vm_trace *t = kind == 0 ? of : kind == 1 ? vm_process_script(of) : NULL;
    const vm_known *known = t ? NULL : vm_lookup_known(vm_workspace_lookup(of), count);
    if (t) *count = t->convs;
    vm_conv *conv = room(*count, sizeof *conv);
    for (size_t i = 0; i < *count; i++) conv[i] = t ? t->conv[i] : known[i].conv;
    return conv;
}

static uint64_t *answered[2]; /* by the last call of answers(): workspaces, and those of next plans, */
static size_t answers_count;  /* and how many of each */

static void answers(void) {
    vm_lookup *l = vm_workspace_lookup(get(&workspaces, (size_t)number()));
    vm_conv *conv = convs(&answers_count);
    vm_status s = VM_OK;
    for (int k = 0; k < 2; k++) {
        free(answered[k]);
        answered[k] = room(answers_count, sizeof **answered);
    }
    for (size_t i = 0; !s && i < answers_count; i++) {
        vm_known known;
        s = vm_lookup_conv(l, &conv[i], &known);
        if (s) continue;
        answered[0][i] = known.bytes;
        answered[1][i] = known.next;
        printf(" %u", (unsigned)known.source);
    }
    free(conv);
    if (s) printf("error: %s", vm_error());
    say(" bytes", answered[0], answers_count);
    say(" next", answered[1], answers_count);
}

static void make_rows(void) {
    vm_workspace *w = get(&workspaces, (size_t)number());
    const bool every = number();
    size_t width, count;
    vm_conv *conv = convs(&width);
    uint64_t *row;
    if (vm_workspace_rows(w, every, conv, width, &row, &count)) stop(vm_error());
    for (size_t i = 0; i < count; i++) {
        uint64_t *const copy = room(width, sizeof *copy);
        memcpy(copy, row + i * width, width * sizeof *copy);
        say(" row", copy, width);
        add(&rows, copy);
    }
    vm_scratch_free(row);
    free(conv);
}

/* ---- traces ---- */

static void say_trace(vm_status s, vm_trace *t) {
    say_made(s, &traces, t);
    if (!s) say("trace", (uint64_t[]){t->convs, t->flops, t->attended, t->moved, t->sent}, 5);
}

static vm_passings passings(void) {
    const size_t count = (size_t)number();
    vm_passing *item = room(count, sizeof *item);
    for (size_t i = 0; i < count; i++) {
        item[i].module = field();
        item[i].until = field();
        item[i].name = field();
        item[i].bytes = number();
        item[i].by = (vm_sender)number();
        item[i].row_bytes = number();
        item[i].row_flops = number();
        item[i].lives = (uint32_t)number();
        item[i].stream = (uint32_t)number();
        item[i].early = (uint32_t)number();
    }
    return (vm_passings){count, item};
}

static vm_companions companions(void) {
    const size_t count = (size_t)number();
    vm_companion *item = room(count, sizeof *item);
    for (size_t i = 0; i < count; i++) {
        item[i].module = field();
        item[i].rank = number();
        item[i].rows = number();
        item[i].columns = number();
    }
    return (vm_companions){count, item};
}

static void vae(void) {
    static const char *const ops[] = {[VM_ENCODE] = "encode", [VM_DECODE] = "decode"};
    const char *model = field(), *name = field();
    const vm_arch *const *found = vm_arch_models();
    while (*found && strcmp((*found)->name, model)) found++;
    if (!*found) stop("want a known model");
    vm_arch arch = **found;
    snprintf(arch.name, sizeof arch.name, "%s", name);
    vm_trace_vae v = {.arch = &arch};
    v.runtime = (vm_trace_runtime)choose(vm_trace_runtime_name, VM_TORCH_RUNTIMES);
    v.op = (vm_op)choose(ops, 2);
    v.dtype = dtype();
    v.first = dtype();
    v.tile_overlap = strtod(field(), NULL);
    const uint64_t *of = some(12);
    v.height = of[0], v.width = of[1], v.batch = of[2], v.tile = of[3];
    v.slicing = of[4], v.channels_last = of[5], v.release = (int)of[6];
    v.gpu = (vm_trace_gpu){(int)of[7], (int)of[8], of[9], 0};
    v.frames = of[10], v.older = of[11];
    v.passing = passings();
    vm_trace *t;
    const vm_status s = vm_trace_vae_build(&v, &t);
    say_trace(s, t);
    free((void *)v.passing.item);
}

/* Its text has tabs for line ends. */
static void program(void) {
    vm_program *p;
    for (char *c = at; (c = strchr(c, '\t')); *c = '\n') continue;
    const vm_status s = vm_program_read(field(), &p);
    say_made(s, &programs, p);
}

static void module(void) {
    const vm_program *p = get(&programs, (size_t)number());
    vm_program_call call = {.dtype = dtype()};
    size_t count;
    const uint64_t *of = numbers(&count);
    if (count > VM_PROGRAM_NAMES) stop("want fewer values");
    for (size_t i = 0; i < count; i++) call.value[i] = (int64_t)of[i];
    of = some(2);
    call.gpu = (vm_trace_gpu){(int)of[0], (int)of[1], 0, (int)of[2]};
    call.passing = passings();
    call.companion = companions();
    vm_trace *t;
    const vm_status s = vm_program_trace(p, &call, &t);
    say_trace(s, t);
    free((void *)call.passing.item);
    free((void *)call.companion.item);
}

/* ---- processes ---- */

static void process(void) {
    const uint64_t *of = some(24);
    vm_talloc_config c = {.total_memory = of[0],
                          .allowed_memory = of[1],
                          .max_split_size = of[2],
                          .max_non_split_rounding = of[3],
                          .reservation = of[4],
                          .expandable_segments = of[5],
                          .driver_pool = of[6],
                          .history = of[7],
                          .gc_threshold = strtod(field(), NULL)};
    for (int i = 0; i < VM_TALLOC_INTERVALS; i++) c.roundup_divisions[i] = (uint32_t)of[8 + i];
    of = some(3);
    const vm_process_blas blas = {of[0], of[1], (vm_cublaslt)of[2]};
    vm_talloc *a;
    vm_process *p;
    if (vm_talloc_new(&c, &a) || vm_process_new(a, &blas, &p)) stop(vm_error());
    add(&allocators, a);
    add(&processes, p);
}

static size_t which; /* process */
static vm_process *chosen(void) { return get(&processes, which = (size_t)number()); }

static void say_readings(const vm_process *p) {
    size_t count;
    const vm_reading *r = vm_process_readings(p, &count);
    for (size_t i = 0; i < count; i++) {
        const vm_work *const w = &r[i].work;
        say(" reading",
            (uint64_t[]){r[i].span.since, r[i].span.until, r[i].base_allocated, r[i].base_reserved, r[i].peak_allocated,
                         r[i].peak_reserved},
            6);
        printf(" %s", vm_names_get(&vm_process_script(p)->names, r[i].name));
        say("", (uint64_t[]){w->flops, w->attended, w->moved, w->sent, w->host_flops, r[i].outside}, 6);
    }
}

/* Where memory ran out, and what the counters say. */
static void say_state(const vm_process *p, vm_status s) {
    const vm_talloc_oom *full = s ? vm_process_last_oom(p) : NULL;
    if (full) {
        printf(" full %s", vm_names_get(&vm_process_script(p)->names, full->tag));
        say("",
            (uint64_t[]){full->requested, full->wanted, full->total, full->free, full->allowed, full->allocated,
                         full->reserved},
            7);
    } else if (s) {
        printf(" error: %s", vm_error());
    }
    const vm_talloc *a = allocators.item[which];
    say(" state",
        (uint64_t[]){(uint64_t)CURRENT(a, VM_TALLOC_ALLOCATED_BYTES), (uint64_t)CURRENT(a, VM_TALLOC_RESERVED_BYTES),
                     (uint64_t)PEAK(a, VM_TALLOC_ALLOCATED_BYTES), (uint64_t)PEAK(a, VM_TALLOC_RESERVED_BYTES),
                     vm_process_most_reserved(p), vm_process_refused(p)},
        6);
}

static void hold(void) {
    vm_process *p = chosen();
    const char *stamp = field(), *name = field();
    size_t count;
    const uint64_t *bytes = numbers(&count);
    uint64_t *address = room(count, sizeof *address);
    const vm_status s = vm_process_hold(p, stamp, name, bytes, count, address);
    if (!s) say("", address, count);
    say_state(p, s);
    free(address);
}

static void copy(void) {
    vm_process *p = chosen();
    const char *stamp = field();
    size_t count, done;
    uint64_t *address = numbers(&count);
    const uint64_t *bytes = numbers(&count);
    const vm_status s = vm_process_copy(p, stamp, address, bytes, count, &done);
    say("", address, count);
    say_state(p, s);
}

static void give(void) {
    vm_process *p = chosen();
    size_t count;
    const uint64_t *address = numbers(&count);
    vm_status s = VM_OK;
    for (size_t i = 0; !s && i < count; i++) s = vm_process_release(p, address[i]);
    say_state(p, s);
}

/* The greatest of so many numbers, and a sum in which their order counts. */
static void say_curve(const char *name, const uint64_t *of, size_t count) {
    uint64_t most = 0, sum = 0;
    for (size_t i = 0; i < count; i++) {
        most = VM_MAX(most, of[i]);
        sum += of[i] * (2 * i + 1);
    }
    say(name, (uint64_t[]){count, most, sum}, 3);
}

/* Workspaces: as in the last call of answers(), or two fields of numbers. */
static void play(void) {
    vm_process *p = chosen();
    const vm_trace *t = get(&traces, (size_t)number());
    size_t count = answers_count;
    const uint64_t *workspace = answered[0], *next = answered[1];
    if (at) workspace = numbers(&count), next = numbers(&count);
    if (count != t->convs) stop("want a workspace for each convolution");
    uint64_t *address = room(t->ids, sizeof *address), *allocated = room(t->steps, sizeof *allocated),
             *reserved = room(t->steps, sizeof *reserved);
    const vm_status s = vm_process_call(p, t, workspace, next, address, allocated, reserved);
    for (uint32_t i = 0; !s && i < t->ids; i++)
        if (address[i]) printf(" %u:%" PRIu64, (unsigned)i, address[i]);
    if (!s) {
        say_curve(" allocated", allocated, t->steps);
        say_curve(" reserved", reserved, t->steps);
    }
    say_state(p, s);
    free(reserved);
    free(allocated);
    free(address);
}

static void empty(void) {
    vm_process *p = chosen();
    say_state(p, vm_process_empty_cache(p));
}

static void reset(void) {
    vm_process *p = chosen();
    say_state(p, vm_process_reset_peak(p));
}

static void read_counters(void) {
    vm_process *p = chosen();
    const vm_status s = vm_process_read(p, field());
    say_readings(p);
    say_state(p, s);
}

static void count_work(void) {
    vm_process *p = chosen();
    const uint64_t *of = some(6);
    vm_process_count(p, &(vm_work){of[0], of[1], of[2], of[3], of[4]}, of[5]);
    say_state(p, VM_OK);
}

static void times(void) {
    vm_process *p = chosen();
    vm_process_times(p, number());
    say_state(p, VM_OK);
}

static void replay(void) {
    vm_process *p = chosen();
    const vm_process *from = get(&processes, (size_t)number());
    const vm_status s = vm_process_replay(p, from, number());
    say_readings(p);
    say_state(p, s);
}

static void least(void) {
    const vm_process *p = chosen();
    const uint64_t *of = some(3);
    uint64_t bytes;
    if (vm_process_least(p, of[0], of[1], of[2], &bytes))
        printf("error: %s", vm_error());
    else
        say("", &bytes, 1);
}

static void say_live(const vm_process *p, vm_process_list *live) {
    for (size_t i = 0; i < live->count; i++)
        if (live->item[i].bytes)
            printf(" %s %" PRIu64 " %" PRIu64, vm_names_get(&vm_process_script(p)->names, live->item[i].name),
                   live->item[i].bytes, live->item[i].rounded);
    vm_scratch_free(live->item);
}

static void peak(void) {
    const vm_process *p = chosen();
    const vm_trace_step *step;
    vm_process_list live;
    if (vm_process_peak(p, (size_t)number(), &live, &step)) stop(vm_error());
    printf(" %s", step ? vm_names_get(&vm_process_script(p)->names, step->name) : "-");
    say_live(p, &live);
}

static void baseline(void) {
    const vm_process *p = chosen();
    vm_process_list live;
    if (vm_process_baseline(p, &live)) stop(vm_error());
    say_live(p, &live);
}

/* ---- the verdict ---- */

/* Rows of make_rows() by their numbers. */
static void takes(void) {
    vm_process *p = chosen();
    const uint64_t *of = some(3); /* first reading, whether bytes count above the baseline, rows that are likely */
    size_t phases, count;
    const uint64_t *phase = numbers(&phases), *row = numbers(&count);
    const size_t width = vm_process_script(p)->convs;
    uint64_t *all = room(count * width, sizeof *all);
    vm_judge_phase *each = room(phases / 2, sizeof *each);
    vm_takes found;
    for (size_t i = 0; i < phases / 2; i++) each[i] = (vm_judge_phase){phase[2 * i], phase[2 * i + 1]};
    for (size_t i = 0; i < count; i++) memcpy(all + i * width, get(&rows, (size_t)row[i]), width * sizeof *all);
    if (vm_judge_rows(p, each, (size_t)of[0], phases / 2, of[1], all, count, (size_t)of[2], &found)) stop(vm_error());
    say("", (uint64_t[]){found.own, found.least, found.most, found.bound}, 4);
    free(each);
    free(all);
}

static bool may_take(void *upper, uint64_t bytes) { return *(const uint64_t *)upper >= bytes; }

static void verdict(void) {
    const uint64_t *of = some(7);
    uint64_t upper = of[6];
    const vm_card_use use = {of[0], of[1], of[2], of[3], of[4], of[5], may_take, &upper};
    vm_reason why;
    const vm_verdict found = vm_judge(&use, &why);
    printf(" %s, %s", vm_verdict_name[found], vm_reason_name[why]);
}

static const struct {
    const char *name;
    void (*make)(void);
} calls[] = {
    {"question", question},
    {"profile", profile},
    {"catalogue", make_catalogue},
    {"load", load},
    {"workspace", workspace},
    {"answers", answers},
    {"rows", make_rows},
    {"vae", vae},
    {"program", program},
    {"module", module},
    {"process", process},
    {"hold", hold},
    {"copy", copy},
    {"release", give},
    {"call", play},
    {"empty", empty},
    {"reset", reset},
    {"count", count_work},
    {"times", times},
    {"read", read_counters},
    {"replay", replay},
    {"least", least},
    {"peak", peak},
    {"baseline", baseline},
    {"takes", takes},
    {"verdict", verdict},
};

static void make_call(char *line) {
    size_t i = 0;
    at = line;
    const char *name = field();
    while (i < sizeof calls / sizeof *calls && strcmp(calls[i].name, name)) i++;
    if (i == sizeof calls / sizeof *calls) stop(name);
    printf("%s:", name);
    calls[i].make();
    putchar('\n');
    while (lists) free(list[--lists]);
}

int main(int count, char **argument) {
    FILE *file = count == 2 ? fopen(argument[1], "r") : NULL;
    char *line = NULL;
    size_t size = 0;
    ssize_t length;
    if (!file) stop("want a file of calls");
    while ((length = getline(&line, &size, file)) > 0) {
        if (line[length - 1] == '\n') line[length - 1] = 0;
        make_call(line);
    }
    fclose(file);
    free(line);
    clear();
    for (size_t i = 0; i < workspaces.count; i++) vm_workspace_free(workspaces.item[i]);
    vm_catalogue_free(catalogue);
    for (size_t i = 0; i < profiles.count; i++) vm_profile_free(profiles.item[i]);
    for (size_t i = 0; i < programs.count; i++) vm_program_free(programs.item[i]);
    for (int k = 0; k < 2; k++) free(answered[k]);
    return 0;
}
