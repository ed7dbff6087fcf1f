/* Makes whole answers without Python: reads the calls that they make of the core from a file that core_calls.py writes,
 * and prints what each returns, and what verdicts follow from them. test_32bit.py builds it for addresses of 32 bits.
 *
 * A line is the name of a call and its fields, separated by tabs. A field is a text, or numbers separated by spaces.
 * Profiles, workspaces and programs count from 0 within the file; traces, scripts, plays and rows of other workspaces within
 * a question. Every line prints one line. */
#include "../csrc/predict/judge.h"
#include "../csrc/predict/modules/program.h"
#include "../csrc/predict/workspace/plausible.h"

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

static table profiles, workspaces, programs, traces, scripts, plays, allocators, rows;

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
    for (size_t i = 0; i < plays.count; i++) {
        vm_play_free(plays.item[i]);
        vm_talloc_delete(allocators.item[i]);
    }
    for (size_t i = 0; i < scripts.count; i++) vm_script_free(scripts.item[i]);
    for (size_t i = 0; i < traces.count; i++) vm_trace_free(traces.item[i]);
    for (size_t i = 0; i < rows.count; i++) free(rows.item[i]);
    scripts.count = plays.count = allocators.count = traces.count = rows.count = 0;
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
    const uint64_t *n = some(7);
    of.coarse = n[0];
    of.torch.cudnn = (int)n[1];
    of.shipped = (int)n[2];
    of.torch.release = (int)n[3];
    of.torch.is_290 = n[4];
    of.torch.is_off = n[5];
    of.tf32 = n[6];
    of.guess = (vm_guess)choose(guess, 4);
    const size_t count = (size_t)number();
    vm_card_rule *r = room(count, sizeof *r);
    for (size_t i = 0; i < count; i++) r[i] = card_rule();
    vm_workspace *w;
    const vm_status s = vm_workspace_new(catalogue, &of, r, count, &w);
    free(r);
    say_made(s, &workspaces, w);
}

/* The convolutions of "trace", "script" or "workspace", and its number. */
static vm_conv *convs(size_t *count) {
    static const char *const kinds[] = {"trace", "script", "workspace"};
    const table *const tables[] = {&traces, &scripts, &workspaces};
    const int kind = choose(kinds, 3);
    void *const of = get(tables[kind], (size_t)number());
    const vm_trace *const t = of;
    const vm_script *const script = of;
    const vm_known *known = NULL;
    if (kind == 2)
        known = vm_lookup_known(vm_workspace_lookup(of), count);
    else
        *count = kind ? script->convs : t->convs;
    vm_conv *conv = room(*count, sizeof *conv);
    for (size_t i = 0; i < *count; i++) conv[i] = known ? known[i].conv : kind ? script->conv[i] : t->conv[i];
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
    v.frames = of[10], v.picture = of[11];
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

/* ---- scripts ---- */

static void make_script(void) {
    vm_script *script;
    if (vm_script_new(&script)) stop(vm_error());
    add(&scripts, script);
}

static vm_script *a_script(void) { return get(&scripts, (size_t)number()); }

static uint64_t handle_of(const vm_script *s, uint32_t id) { return s->storage[id].bytes ? (uint64_t)id + 1 : 0; }

static void say_written(const vm_script *script, vm_status s) {
    printf(" events %zu", script->events);
    if (s) printf(" error: %s", vm_error());
}

static void take(void) {
    vm_script *script = a_script();
    const char *stamp = field(), *name = field();
    size_t count;
    uint32_t first;
    const uint64_t *bytes = numbers(&count);
    const vm_status s = vm_script_take(script, stamp, name, bytes, count, &first);
    for (size_t i = 0; !s && i < count; i++) say("", (uint64_t[]){handle_of(script, first + (uint32_t)i)}, 1);
    say_written(script, s);
}

/* Handles of storages as their numbers. */
static uint32_t *storages(size_t *count) {
    const uint64_t *handle = numbers(count);
    uint32_t *id = room(*count, sizeof *id);
    for (size_t i = 0; i < *count; i++) id[i] = (uint32_t)(handle[i] - 1);
    return id;
}

static void replace(void) {
    vm_script *script = a_script();
    const char *stamp = field();
    size_t count;
    uint32_t *id = storages(&count);
    const uint64_t *bytes = numbers(&count);
    const vm_status s = vm_script_replace(script, stamp, id, bytes, count);
    for (size_t i = 0; !s && i < count; i++) say("", (uint64_t[]){handle_of(script, id[i])}, 1);
    say_written(script, s);
    free(id);
}

static void give(void) {
    vm_script *script = a_script();
    size_t count, kept = 0;
    uint32_t *id = storages(&count);
    for (size_t i = 0; i < count; i++)
        if (id[i] != UINT32_MAX) id[kept++] = id[i]; /* others have 0 bytes */
    say_written(script, vm_script_give(script, id, kept));
    free(id);
}

static void say_left(const vm_script *script, const vm_event *e) {
    for (uint32_t i = 0; i < e->count; i++)
        printf(" %u:%" PRIu64, (unsigned)script->call[e->of].left[i], handle_of(script, e->first + i));
}

static void empty(void) {
    vm_script *script = a_script();
    say_written(script, vm_script_empty_cache(script));
}

static void reset(void) {
    vm_script *script = a_script();
    say_written(script, vm_script_reset_peak(script));
}

static void read_counters(void) {
    vm_script *script = a_script();
    const vm_status s = vm_script_read(script, field());
    const vm_phase *const p = &script->phase[script->phases - 1];
    const vm_work *const w = &p->work;
    printf(" %s", vm_names_get(&script->names, p->name));
    say("", (uint64_t[]){w->flops, w->attended, w->moved, w->sent, w->host_flops, p->outside}, 6);
    say_written(script, s);
}

static void count_work(void) {
    vm_script *script = a_script();
    const uint64_t *of = some(6);
    vm_script_count(script, &(vm_work){of[0], of[1], of[2], of[3], of[4]}, of[5]);
    say_written(script, VM_OK);
}

static void times(void) {
    vm_script *script = a_script();
    vm_script_times(script, number());
    say_written(script, VM_OK);
}

/* ---- plays ---- */

static vm_talloc *allocator(void) {
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
    vm_talloc *a;
    if (vm_talloc_new(&c, &a)) stop(vm_error());
    add(&allocators, a);
    return a;
}

static void play(void) {
    const vm_script *script = a_script();
    vm_talloc *const a = allocator();
    const uint64_t *of = some(4);
    const vm_blas blas = {of[1], of[2], (vm_cublaslt)of[3]};
    vm_play *p;
    if (vm_play_new(script, a, &blas, of[0], &p)) stop(vm_error());
    vm_play_note_heights(p, true);
    add(&plays, p);
}

static size_t which; /* play */
static vm_play *chosen(void) { return get(&plays, which = (size_t)number()); }

static void elsewhere(void) {
    const vm_play *like = chosen();
    vm_talloc *const a = allocator();
    vm_play *p;
    if (vm_play_elsewhere(like, a, number(), false, &p)) stop(vm_error());
    vm_play_note_heights(p, true);
    add(&plays, p);
}

/* What the counters say, and where memory ran out. */
static void say_state(const vm_play *p, vm_status s) {
    const vm_talloc *a = allocators.item[which];
    const vm_talloc_oom *full = s ? vm_play_oom(p) : NULL;
    size_t count;
    const vm_reading *const r = vm_play_readings(p, &count);
    say(" state",
        (uint64_t[]){(uint64_t)CURRENT(a, VM_TALLOC_ALLOCATED_BYTES), (uint64_t)CURRENT(a, VM_TALLOC_RESERVED_BYTES),
                     (uint64_t)PEAK(a, VM_TALLOC_ALLOCATED_BYTES), (uint64_t)PEAK(a, VM_TALLOC_RESERVED_BYTES),
                     vm_play_most_reserved(p), vm_play_refused(p), count},
        7);
    for (size_t i = count - !!count; i < count; i++)
        say(" reading",
            (uint64_t[]){r[i].span.since, r[i].span.until, r[i].base_allocated, r[i].base_reserved, r[i].peak_allocated,
                         r[i].peak_reserved},
            6);
    if (full) {
        printf(" full %s", vm_names_get(&vm_play_script(p)->names, full->tag));
        say("",
            (uint64_t[]){full->requested, full->wanted, full->total, full->free, full->allowed, full->allocated,
                         full->reserved},
            7);
    } else if (s) {
        printf(" error: %s", vm_error());
    }
}

static void run(void) {
    vm_play *p = chosen();
    size_t taken;
    say_state(p, vm_play_run(p, &taken));
}

/* The script of a play belongs to this file. */
static vm_script *written(const vm_play *p) { return (vm_script *)vm_play_script(p); }

static void follow(void) {
    vm_play *p = chosen();
    say_state(p, vm_play_follow(p, written(p)));
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
static void call(void) {
    vm_play *p = chosen();
    vm_script *const script = written(p);
    vm_trace *t = get(&traces, (size_t)number());
    size_t count = answers_count;
    const uint64_t *workspace = answered[0], *next = answered[1];
    const vm_event *e;
    if (at) workspace = numbers(&count), next = numbers(&count);
    if (count != t->convs) stop("want a workspace for each convolution");
    if (vm_script_call(script, t, &e)) stop(vm_error());
    const vm_event event = *e;
    if (vm_play_answer_call(p, &script->call[event.of], workspace, next)) stop(vm_error());
    const vm_status s = vm_play_follow(p, script);
    if (!s) {
        const vm_heights *const h = vm_play_heights(p);
        say_left(script, &event);
        say_curve(" allocated", h->allocated, h->of->trace->steps);
        say_curve(" reserved", h->reserved, h->of->trace->steps);
    }
    say_state(p, s);
}

static void least(void) {
    const vm_play *p = chosen();
    const uint64_t *of = some(3);
    uint64_t bytes;
    if (vm_judge_least(p, of[0], of[1], of[2], &bytes))
        printf("error: %s", vm_error());
    else
        say("", &bytes, 1);
}

static void say_live(const vm_play *p, vm_live_list *live) {
    for (size_t i = 0; i < live->count; i++)
        if (live->item[i].bytes)
            printf(" %s %" PRIu64 " %" PRIu64, vm_names_get(&vm_play_script(p)->names, live->item[i].name),
                   live->item[i].bytes, live->item[i].rounded);
    vm_scratch_free(live->item);
}

static void peak(void) {
    const vm_play *p = chosen();
    uint32_t step;
    vm_live_list live;
    if (vm_play_peak(p, (size_t)number(), &live, &step)) stop(vm_error());
    printf(" %s", step == VM_NO_NAME ? "-" : vm_names_get(&vm_play_script(p)->names, step));
    say_live(p, &live);
}

static void baseline(void) {
    const vm_play *p = chosen();
    vm_live_list live;
    if (vm_play_baseline(p, &live)) stop(vm_error());
    say_live(p, &live);
}

/* ---- the verdict ---- */

/* Rows of make_rows() by their numbers. */
static void takes(void) {
    const vm_play *p = chosen();
    const uint64_t *of = some(2); /* whether bytes count above the baseline, rows that are likely */
    size_t phases, count;
    const uint64_t *phase = numbers(&phases), *row = numbers(&count);
    const size_t width = vm_play_script(p)->convs;
    uint64_t *all = room(count * width, sizeof *all);
    vm_judge_phase *each = room(phases / 4, sizeof *each);
    vm_takes found;
    for (size_t i = 0; i < phases / 4; i++) {
        const uint64_t *const one = phase + 4 * i;
        each[i] = (vm_judge_phase){(size_t)one[0], one[1], one[2], one[3]};
    }
    for (size_t i = 0; i < count; i++) memcpy(all + i * width, get(&rows, (size_t)row[i]), width * sizeof *all);
    if (vm_judge_rows(p, each, phases / 4, of[0], all, count, (size_t)of[1], &found)) stop(vm_error());
    say("", (uint64_t[]){found.own, found.least, found.most, found.bound}, 4);
    free(each);
    free(all);
}

static void verdict(void) {
    const uint64_t *of = some(7);
    const vm_card_use use = {of[0], of[1], of[2], of[3], of[4], of[5], of[6], false};
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
    {"script", make_script},
    {"take", take},
    {"replace", replace},
    {"give", give},
    {"empty", empty},
    {"reset", reset},
    {"count", count_work},
    {"times", times},
    {"read", read_counters},
    {"play", play},
    {"elsewhere", elsewhere},
    {"run", run},
    {"follow", follow},
    {"call", call},
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
