/* What threads do with the core, for ThreadSanitizer to watch: pools, models, accounts, allocators. Locks stand where the
 * binding has them (csrc/python/py.h). Built and run by tests/test_threads.py; exits with 0 when every result is right. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../csrc/predict/play.h"
#include "../../csrc/vm.h"

enum { CREW = 3, ROUNDS = 2, SIDE = 32, PIXELS = 3 * SIDE * SIDE, LATENTS = 4 * (SIDE / 2) * (SIDE / 2) };

#define CHECK(condition)                                                                                \
    do {                                                                                                \
        if (!(condition)) {                                                                             \
            fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition, vm_error()); \
            exit(1);                                                                                    \
        }                                                                                               \
    } while (0)

/* Runs CREW threads and joins them. */
static void crew(void *(*work)(void *), void *shared) {
    pthread_t thread[CREW];
    for (int i = 0; i < CREW; i++) CHECK(!pthread_create(&thread[i], NULL, work, shared));
    for (int i = 0; i < CREW; i++) CHECK(!pthread_join(thread[i], NULL));
}

/* ---- pools ---- */

enum { TASKS = 400 };

static void count_task(const void *job, size_t task, unsigned thread) {
    (void)thread;
    int *const *done = job;
    for (volatile int spin = 0; spin < 2000; spin++) continue;
    (*done)[task]++;
}

static bool poll_on(void *context, size_t done, size_t total) { return (void)context, (void)done, (void)total, false; }
static bool poll_stop(void *context, size_t done, size_t total) { return (void)context, (void)done, (void)total, true; }
static bool poll_exit(void *context, size_t done, size_t total) {
    (void)context, (void)done, (void)total;
    pthread_exit(NULL);
}

static void *run_pool(void *poll) {
    int *done = calloc(TASKS, sizeof *done);
    vm_pool *pool = calloc(1, vm_pool_bytes(CREW));
    CHECK(done && pool && !vm_pool_open(pool, CREW, 2, *(vm_poll *)poll, NULL));
    vm_status s = VM_OK;
    int batches = 0;
    while (!s && batches < ROUNDS) {
        s = vm_pool_each(pool, TASKS, 1, count_task, &done);
        batches += !s;
    }
    CHECK(s == VM_OK || s == VM_ECANCELLED);
    vm_pool_close(pool);
    for (int i = 0; i < TASKS; i++) CHECK(done[i] == batches || (s && done[i] == batches + 1));
    free(done);
    free(pool);
    return NULL;
}

/* The thread ends within poll; what its workers used goes only after them. */
static void *run_pool_until_exit(void *out) {
    int *done = calloc(TASKS, sizeof *done);
    vm_pool *pool = calloc(1, vm_pool_bytes(CREW));
    ((void **)out)[0] = done;
    ((void **)out)[1] = pool;
    CHECK(done && pool && !vm_pool_open(pool, CREW, 2, poll_exit, NULL));
    for (;;) CHECK(!vm_pool_each(pool, TASKS, 1, count_task, &done));
}

/* A run that was told to stop asks no more, however long its workers' tasks last: the answer may be an exception. */
static void slow_task(const void *job, size_t task, unsigned thread) {
    (void)job, (void)task;
    const struct timespec t = {.tv_nsec = (thread ? 300 : 60) * 1000000L};
    nanosleep(&t, NULL);
}

static bool poll_once(void *context, size_t done, size_t total) {
    (void)done, (void)total;
    return ++*(int *)context > 0;
}

static void stop_slow_pool(void) {
    int asked = 0;
    vm_pool *pool = calloc(1, vm_pool_bytes(CREW));
    CHECK(pool && !vm_pool_open(pool, CREW, 1, poll_once, &asked));
    CHECK(vm_pool_each(pool, 2 * CREW, 1, slow_task, NULL) == VM_ECANCELLED && asked == 1);
    vm_pool_close(pool);
    free(pool);
}

static void pools(void) {
    vm_poll on = poll_on, stop = poll_stop, none = NULL;
    crew(run_pool, &on);
    crew(run_pool, &stop);
    crew(run_pool, &none);
    void *left[2];
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, run_pool_until_exit, left) && !pthread_join(thread, NULL));
    free(left[0]);
    free(left[1]);
    stop_slow_pool();
}

/* ---- models ---- */

static const vm_arch arch = {.name = "small",
                             .in_channels = 3,
                             .out_channels = 3,
                             .latent_channels = 4,
                             .levels = 2,
                             .block_out_channels = {16, 32},
                             .layers_per_block = 1,
                             .norm_num_groups = 8,
                             .norm_eps = 1e-6f,
                             .use_quant_conv = true,
                             .use_post_quant_conv = true,
                             .mid_block_add_attention = true,
                             .scaling_known = true,
                             .scaling_factor = 1};

/* The numbers that models are in. */
static const vm_backend *backend;

/* Its filters are zero, and its biases larger than float16's numbers: there every thread stores what is not finite. */
static vm_model *new_model(const vm_arch *arch) {
    static const float zero[32 * 1024];
    float large[64];
    vm_model *m;
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) large[i] = 1e5f;
    CHECK(!vm_model_new(arch, VM_DECODER, backend, &m));
    for (size_t i = 0; i < m->tensors; i++) {
        const vm_weight *w = &m->tensor[i].weight;
        CHECK(w->out * w->in * w->ksize * w->ksize <= (w->vector ? sizeof large : sizeof zero) / sizeof(float));
        CHECK(!vm_weights_set(m, i, VM_F32, w->vector ? large : zero));
    }
    return m;
}

static vm_request request(void) {
    return (vm_request){.op = VM_DECODE,
                        .backend = backend,
                        .limits = {.threads = 2},
                        .height = SIDE,
                        .width = SIDE,
                        .batch = 1,
                        .in = VM_F32_NCHW,
                        .out = VM_F32_NCHW,
                        .host_arrays = true};
}

static void decode(vm_model *m, vm_poll poll) {
    const vm_request ask = request();
    float *in = calloc(LATENTS, sizeof *in), *out = calloc(PIXELS, sizeof *out);
    vm_plan *plan;
    CHECK(in && out && !vm_plan_new(m, &ask, &plan));
    const ptrdiff_t pixel = sizeof *in, row = SIDE / 2 * pixel, channel = SIDE / 2 * row;
    vm_run run = {.in = {in, 'f', sizeof *in, .channel = channel, .row = row, .pixel = pixel},
                  .out = out,
                  .wait = true,
                  .poll = poll};
    const vm_status s = vm_plan_run(m, plan, &run);
    CHECK(s == VM_OK || (poll && s == VM_ECANCELLED));
    CHECK(s || run.overflow == (backend->dtype == VM_F16));
    vm_plan_free(m, plan);
    free(in);
    free(out);
}

static void *own_model(void *unused) {
    vm_model *m = new_model(&arch);
    for (int i = 0; i < ROUNDS; i++) decode(m, NULL);
    decode(m, poll_stop);
    vm_model_free(m);
    return unused;
}

typedef struct shared {
    pthread_mutex_t lock;
    void *object;
} shared;

/* Runs wait for each other; plans for nobody. */
static void *shared_model(void *context) {
    shared *s = context;
    for (int i = 0; i < ROUNDS; i++) {
        pthread_mutex_lock(&s->lock);
        decode(s->object, NULL);
        if (i == 0) vm_model_trim(s->object);
        pthread_mutex_unlock(&s->lock);
        const vm_request ask = request();
        vm_plan *plan;
        CHECK(!vm_plan_new(s->object, &ask, &plan));
        CHECK(plan->arena_bytes);
        vm_plan_free(s->object, plan);
    }
    return NULL;
}

/* Within the smallest limit rows are streamed through rings: threads overwrite rows that others have read. */
static void stream(void) {
    enum { SIDES = 4 };
    vm_arch without_attention = arch;
    without_attention.mid_block_add_attention = false;
    vm_model *m = new_model(&without_attention);
    vm_request ask = request();
    float *in = calloc(SIDES * SIDES * LATENTS, sizeof *in), *out = calloc(SIDES * SIDES * PIXELS, sizeof *out);
    vm_plan *plan;
    ask.height = ask.width = SIDES * SIDE;
    ask.limits.threads = CREW;
    ask.memory_limit = 1;
    CHECK(in && out && vm_plan_new(m, &ask, &plan) == VM_ELIMIT);
    ask.memory_limit = plan->reserved;
    vm_plan_free(m, plan);
    CHECK(!vm_plan_new(m, &ask, &plan) && plan->work > 1);
    const ptrdiff_t pixel = sizeof *in, row = SIDES * SIDE / 2 * pixel, channel = SIDES * SIDE / 2 * row;
    vm_run run = {
        .in = {in, 'f', sizeof *in, .channel = channel, .row = row, .pixel = pixel}, .out = out, .wait = true};
    CHECK(!vm_plan_run(m, plan, &run));
    vm_plan_free(m, plan);
    vm_model_free(m);
    free(in);
    free(out);
}

static void models(void) {
    crew(own_model, NULL);
    shared s = {PTHREAD_MUTEX_INITIALIZER, new_model(&arch)};
    crew(shared_model, &s);
    vm_model_free(s.object);
}

/* ---- accounts ---- */

static void *use_account(void *account) {
    vm_mem *mem = vm_mem_retain(account);
    for (int i = 1; i < 200; i++) {
        void *block;
        CHECK(!vm_mem_alloc(mem, VM_OUTPUT, (size_t)i * 100, &block));
        CHECK(vm_mem_usage(mem).live[VM_OUTPUT] >= (size_t)i * 100);
        vm_mem_reset_peak(mem);
        vm_mem_free(mem, VM_OUTPUT, block, (size_t)i * 100);
    }
    vm_mem_release(mem);
    return NULL;
}

static void accounts(void) {
    vm_mem *mem = vm_mem_new(vm_backend_at(VM_F32, VM_HIGHEST, 0));
    crew(use_account, mem);
    const vm_usage left = vm_mem_usage(mem);
    CHECK(!left.live[VM_OUTPUT] && !left.reserved);
    vm_mem_release(mem);
}

/* ---- scripts on simulated devices ---- */

/* A call of a VAE, and everything that it leaves given. */
static vm_script *new_script(void) {
    const vm_trace_vae vae = {
        .arch = &arch, .op = VM_DECODE, .height = 64, .width = 64, .batch = 1, .frames = 1, .gpu = {89, 128}};
    vm_script *script;
    vm_trace *t;
    const vm_event *e;
    CHECK(!vm_trace_vae_build(&vae, &t) && !vm_script_new(&script) && !vm_script_call(script, t, &e));
    vm_trace_free(t);
    const vm_event event = *e;
    for (uint32_t id = event.first; id < event.first + event.count; id++) CHECK(!vm_script_give(script, &id, 1));
    CHECK(!vm_script_read(script, "decode"));
    return script;
}

static void play(vm_talloc *a, const vm_script *script) {
    const vm_blas blas = {0};
    vm_play *p;
    size_t taken, count;
    CHECK(!vm_play_new(script, a, &blas, 0, &p) && !vm_play_run(p, &taken));
    CHECK(!vm_talloc_get_stats(a)->of[VM_TALLOC_ALLOCATED_BYTES][VM_TALLOC_ALL].current);
    CHECK(vm_play_readings(p, &count) && count == 1);
    vm_play_free(p);
}

static void *own_script(void *unused) {
    const vm_talloc_config config = {.history = true};
    vm_script *script = new_script();
    vm_talloc *a;
    CHECK(!vm_talloc_new(&config, &a));
    for (int i = 0; i < ROUNDS; i++) play(a, script);
    vm_talloc_delete(a);
    vm_script_free(script);
    return unused;
}

/* Plays of one script on allocators of their own. */
static void *shared_script(void *script) {
    for (int i = 0; i < ROUNDS; i++) {
        const vm_talloc_config config = {.expandable_segments = i % 2};
        vm_talloc *a;
        CHECK(!vm_talloc_new(&config, &a));
        play(a, script);
        vm_talloc_delete(a);
    }
    return NULL;
}

static void *shared_allocator(void *context) {
    shared *s = context;
    vm_script *script = new_script();
    for (int i = 0; i < ROUNDS; i++) {
        pthread_mutex_lock(&s->lock);
        play(s->object, script);
        pthread_mutex_unlock(&s->lock);
    }
    vm_script_free(script);
    return NULL;
}

static void plays(void) {
    crew(own_script, NULL);
    vm_script *script = new_script();
    crew(shared_script, script);
    vm_script_free(script);
    const vm_talloc_config config = {.expandable_segments = true};
    vm_talloc *a;
    CHECK(!vm_talloc_new(&config, &a));
    shared s = {PTHREAD_MUTEX_INITIALIZER, a};
    crew(shared_allocator, &s);
    vm_talloc_delete(a);
}

int main(void) {
    pools();
    accounts();
    plays();
    for (vm_dtype dtype = VM_F32; dtype <= VM_BF16; dtype++)
        for (vm_precision p = VM_HIGHEST; p <= (dtype == VM_F32 ? VM_HIGH : VM_HIGHEST); p++) {
            backend = vm_backend_at(dtype, p, 0);
            models();
        }
    backend = vm_backend_at(VM_F32, VM_HIGHEST, 0);
    stream();
    puts("ok");
    return 0;
}
