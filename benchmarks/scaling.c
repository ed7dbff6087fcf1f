/* Models a decode on more threads than this machine has: the core's own plan and schedule, on a clock of its own.
 *
 *   scaling pool THREADS                            seconds of a batch without work, on real threads
 *   scaling copy                                    bytes per second that two threads copy in memory
 *   scaling run SIZE DTYPE LIMIT BATCH EACH THREADS a decode of SDXL, with each number of threads
 *
 * A pool takes the place of csrc/engine/threads.c. It has one real thread, and a clock for each thread of the model. A task runs
 * on the thread that is free first. Its time is the processor time of such a task: a pass's first tasks are run and
 * timed, their median stands for the rest, and the rest are skipped. So the image is wrong. The caller works alone
 * between batches. A batch costs BATCH seconds, and EACH for each thread that it wakes. LIMIT: bytes besides the
 * weights, or 0.
 *
 * `run` prints a line for a number of threads: these, the plan's work and its bytes besides the weights. A line for
 * each chain follows: its first pass, its passes, its batches and tasks, the seconds that it takes, those of all
 * tasks, those of the caller alone, and the bytes of its stored tensors. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The real pool, by other names. */
#define vm_pool_open real_open
#define vm_pool_close real_close
#define vm_pool_each real_each
#define vm_now real_now
#include "../csrc/engine/threads.c"
#undef vm_pool_open
#undef vm_pool_close
#undef vm_pool_each
#undef vm_now

double vm_now(void);
vm_status vm_pool_open(vm_pool *pool, unsigned threads, size_t rows_total, vm_poll poll, void *poll_context);
void vm_pool_close(vm_pool *pool);
vm_status vm_pool_each(void *pool, size_t n, size_t rows, vm_task fn, const void *job);

#include "../csrc/engine/flow.c"
#include "../csrc/engine/run.c"

enum { MOST_THREADS = 256, KINDS = 1024, SAMPLES = 5 };

#define CHECK(condition)                                                                    \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            fprintf(stderr, "%s:%d: %s; %s\n", __FILE__, __LINE__, #condition, vm_error()); \
            exit(1);                                                                        \
        }                                                                                   \
    } while (0)

static double cpu_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- the model's pool ---- */

/* Tasks that take equally long, whatever the number of threads: those of a pass, or of one of its preparations. */
typedef struct kind {
    vm_task fn;
    size_t of; /* which pass; or how many tasks, of a preparation in this chain */
    const char *name;
    bool tight;
    double seconds[SAMPLES];
    size_t samples;
} kind;

static struct {
    unsigned threads;
    double batch, each;
    double now, mark, busy, alone; /* seconds; mark: of the processor's clock, when the caller last went on alone */
    size_t batches, tasks;
    const vm_plan *plan;
    const vm_chain *chain;
    kind of[KINDS];
    size_t kinds;
} model;

static void caller_worked(void) {
    const double t = cpu_now() - model.mark;
    model.now += t;
    model.alone += t;
    model.mark = cpu_now();
}

double vm_now(void) {
    caller_worked();
    return model.now;
}

vm_status vm_pool_open(vm_pool *p, unsigned threads, size_t rows_total, vm_poll poll, void *poll_context) {
    (void)p, (void)rows_total, (void)poll, (void)poll_context;
    model.threads = threads;
    model.mark = cpu_now();
    return VM_OK;
}

void vm_pool_close(vm_pool *p) { (void)p; }

static kind *find_kind(const kind *like) {
    for (kind *k = model.of; k < model.of + model.kinds; k++)
        if (k->fn == like->fn && k->of == like->of && k->name == like->name && k->tight == like->tight) return k;
    CHECK(model.kinds < KINDS);
    model.of[model.kinds] = *like;
    return &model.of[model.kinds++];
}

static int compare(const void *a, const void *b) {
    return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b);
}

/* Returns: a task's seconds. n: of tasks in its batch. node: in the chain. */
static double take_time(vm_task fn, const void *job, size_t task, unsigned thread, size_t n, size_t node) {
    const kind like = {.fn = fn,
                       .of = n,
                       .name = model.plan->graph->node[model.chain->first + (int)node].name,
                       .tight = model.chain->tight};
    kind *k = find_kind(&like);
    if (k->samples < SAMPLES) {
        const double start = cpu_now();
        fn(job, task, thread);
        k->seconds[k->samples++] = cpu_now() - start;
        qsort(k->seconds, k->samples, sizeof *k->seconds, compare);
    }
    return k->seconds[k->samples / 2];
}

/* Returns: the thread that is free first. */
static unsigned first_free(const double *until) {
    unsigned first = 0;
    for (unsigned t = 1; t < model.threads; t++)
        if (until[t] < until[first]) first = t;
    return first;
}

/* Lets thread t take a task, or begin the one that it took, if it may. */
static void go_on(flow *f, size_t *left, size_t *task, double *until, double now, unsigned t) {
    if (f->at[t].stage == NOWHERE && *left) {
        const size_t stage = next_task(f, &task[t]);
        f->at[t] = (place){stage, task[t] / f->done[stage].cut.columns};
        --*left;
    }
    const size_t stage = f->at[t].stage;
    if (stage == NOWHERE || until[t] < INFINITY || !may_begin(f, stage, f->at[t].row)) return;
    const double seconds = take_time(f->tasks[stage].fn, f->tasks[stage].job, task[t], t, 0, stage);
    until[t] = now + seconds;
    model.busy += seconds;
}

/* Returns: when the n tasks of a round are done. */
static double flow_seconds(flow *f, size_t n) {
    double until[MOST_THREADS], now = 0; /* until: INFINITY if it has no task, or waits with it */
    size_t task[MOST_THREADS], left = n;
    for (unsigned t = 0; t < model.threads; t++) until[t] = INFINITY;
    for (size_t ended = 0; ended < n; ended++) {
        for (unsigned t = 0; t < model.threads; t++) go_on(f, &left, task, until, now, t);
        const unsigned t = first_free(until);
        const size_t stage = f->at[t].stage;
        now = until[t];
        CHECK(now < INFINITY);
        until[t] = INFINITY;
        f->at[t].stage = NOWHERE;
        move_on(f, stage);
    }
    return now;
}

static double batch_seconds(size_t n) {
    (void)n; /* all threads wake, however few the tasks */
    return model.threads > 1 ? model.batch + model.each * (model.threads - 1) : 0;
}

vm_status vm_pool_each(void *pool, size_t n, size_t rows, vm_task fn, const void *job) {
    (void)pool, (void)rows;
    caller_worked();
    double until[MOST_THREADS] = {0}, last = 0;
    if (fn == flow_task) last = flow_seconds(*(flow *const *)job, n);
    for (size_t i = 0; i < n && fn != flow_task; i++) {
        const unsigned thread = first_free(until);
        const double seconds = take_time(fn, job, i, thread, n, 0);
        until[thread] += seconds;
        model.busy += seconds;
        last = VM_MAX(last, until[thread]);
    }
    model.now += last + batch_seconds(n);
    model.batches++;
    model.tasks += n;
    model.mark = cpu_now();
    return VM_OK;
}

/* ---- a run ---- */

static const vm_arch sdxl = {.name = "sdxl",
                             .in_channels = 3,
                             .out_channels = 3,
                             .latent_channels = 4,
                             .levels = 4,
                             .block_out_channels = {128, 256, 512, 512},
                             .layers_per_block = 2,
                             .norm_num_groups = 32,
                             .norm_eps = 1e-6f,
                             .use_quant_conv = true,
                             .use_post_quant_conv = true,
                             .mid_block_add_attention = true,
                             .scaling_known = true,
                             .scaling_factor = 1};

static vm_model *new_model(const vm_backend *backend) {
    vm_model *m;
    CHECK(!vm_model_new(&sdxl, VM_DECODER, backend, &m));
    float *numbers = malloc(512 * 512 * 9 * sizeof *numbers);
    uint32_t seed = 1;
    CHECK(numbers);
    for (size_t i = 0; i < 512 * 512 * 9; i++) {
        seed = seed * 1664525 + 1013904223;
        numbers[i] = ((float)(seed >> 8) / (1 << 24) - 0.5f) / 16;
    }
    for (size_t i = 0; i < m->tensors; i++) CHECK(!vm_weights_set(m, i, VM_F32, numbers));
    free(numbers);
    return m;
}

/* Returns: the bytes of a pass's tensors, each read or written once. */
static double bytes_of(const vm_pass *p, size_t number) {
    const double y = (double)(p->y.c * p->y.h * p->y.w), x = (double)(p->x.c * p->x.h * p->x.w);
    return (x + y * (p->add ? 2 : 1)) * (double)number;
}

/* Runs the walk of run.c chain by chain. */
static void run_chains(vm_model *m, vm_plan *plan, vm_run *run) {
    const vm_backend *b = plan->request.backend;
    vm_pool *pool = calloc(1, plan->pool_bytes);
    CHECK(pool && !reserve_arena(m, plan) && !vm_pool_open(pool, plan->request.limits.threads, 0, NULL, NULL));
    memset(m->arena, 0, plan->arena_bytes); /* takes its pages */
    walk w = {m, plan, run, m->arena, b, b->device, {plan->request.limits, pool, vm_pool_each}};
    for (size_t c = 0; c < plan->chains; c++) {
        const vm_chain *chain = &plan->chain[c];
        model.plan = plan;
        model.chain = chain;
        model.now = model.busy = model.alone = 0;
        model.batches = model.tasks = 0;
        model.mark = cpu_now();
        CHECK(!run_passes(&w, (int)c, 0));
        caller_worked();
        double bytes = 0;
        for (int i = chain->first; i <= chain->last; i++) {
            const vm_step *s = &plan->step[i];
            if (!s->streamed)
                bytes += s->flops / vm_pass_flops(&s->pass) * bytes_of(&s->pass, vm_dtype_bytes(b->dtype));
        }
        printf("%s %d %zu %zu %.7f %.7f %.7f %.0f\n", plan->graph->node[chain->first].name,
               chain->last - chain->first + 1, model.batches, model.tasks, model.now, model.busy, model.alone, bytes);
    }
    free(pool);
}

static void run_model(vm_model *m, size_t size, double limit, unsigned threads) {
    const vm_backend *b = m->backend;
    const size_t weights = vm_mem_usage(m->mem).live[VM_WEIGHTS];
    const vm_request request = {.op = VM_DECODE,
                                .backend = b,
                                .limits = {.threads = threads},
                                .height = size,
                                .width = size,
                                .batch = 1,
                                .in = VM_F32_NCHW,
                                .out = VM_F32_NCHW,
                                .host_arrays = true,
                                .memory_limit = limit > 0 ? (size_t)limit + weights : 0};
    float *in = calloc(size * size / 16, sizeof *in), *out = calloc(3 * size * size, sizeof *out);
    vm_plan *plan;
    CHECK(in && out && !vm_plan_new(m, &request, &plan));
    printf("%u %.4f %zu\n", threads, plan->work, plan->reserved - weights);
    const ptrdiff_t pixel = sizeof *in, row = (ptrdiff_t)size / 8 * pixel;
    vm_run run = {.in = {in, 'f', sizeof *in, .channel = row * (ptrdiff_t)size / 8, .row = row, .pixel = pixel},
                  .out = out,
                  .wait = true};
    run_chains(m, plan, &run);
    fflush(stdout);
    vm_plan_free(m, plan);
    free(in);
    free(out);
}

static int run_all(int words, char **word) {
    const vm_dtype dtype = !strcmp(word[1], "bfloat16") ? VM_BF16 : !strcmp(word[1], "float16") ? VM_F16 : VM_F32;
    const vm_backend *b;
    for (size_t i = 0; !(b = vm_backend_at(dtype, VM_HIGHEST, i))->usable(); i++) continue;
    vm_model *m = new_model(b);
    model.batch = atof(word[3]);
    model.each = atof(word[4]);
    for (int i = 5; i < words; i++) run_model(m, (size_t)atoi(word[0]), atof(word[2]), (unsigned)atoi(word[i]));
    vm_model_free(m);
    return 0;
}

/* ---- measurements for the model ---- */

static void no_task(const void *job, size_t task, unsigned thread) { (void)job, (void)task, (void)thread; }

static int time_pool(unsigned threads) {
    enum { BATCHES = 20, ROUNDS = 200 };
    double seconds[ROUNDS];
    vm_pool *pool = calloc(1, vm_pool_bytes(threads));
    CHECK(pool && !real_open(pool, threads, 0, NULL, NULL));
    for (size_t r = 0; r < ROUNDS; r++) {
        const double start = real_now();
        for (size_t i = 0; i < BATCHES; i++) CHECK(!real_each(pool, threads, 0, no_task, NULL));
        seconds[r] = (real_now() - start) / BATCHES;
    }
    real_close(pool);
    free(pool);
    qsort(seconds, ROUNDS, sizeof *seconds, compare);
    printf("%.9f\n", seconds[0]);
    return 0;
}

enum { COPY = 128 << 20 };

static void copy_part(const void *job, size_t task, unsigned thread) {
    (void)thread;
    char *const *half = job;
    memcpy(half[1] + task * (COPY / 16), half[0] + task * (COPY / 16), COPY / 16);
}

static int time_copy(void) {
    enum { ROUNDS = 9 };
    double best = 0;
    char *half[] = {malloc(COPY), malloc(COPY)};
    vm_pool *pool = calloc(1, vm_pool_bytes(2));
    CHECK(half[0] && half[1] && pool && !real_open(pool, 2, 0, NULL, NULL));
    memset(half[0], 1, COPY);
    for (size_t r = 0; r < ROUNDS; r++) {
        const double start = real_now();
        CHECK(!real_each(pool, 16, 0, copy_part, half));
        best = VM_MAX(best, 2.0 * COPY / (real_now() - start));
    }
    real_close(pool);
    printf("%.0f\n", best);
    return 0;
}

int main(int words, char **word) {
    if (words > 7 && !strcmp(word[1], "run")) return run_all(words - 2, word + 2);
    if (words == 3 && !strcmp(word[1], "pool")) return time_pool((unsigned)atoi(word[2]));
    if (words == 2 && !strcmp(word[1], "copy")) return time_copy();
    fprintf(stderr, "scaling: expected pool, copy or run\n");
    return 2;
}
