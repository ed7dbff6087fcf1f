/* The only threads of the core. They live for one run, so a fork between runs meets none of them.
 *
 * They are joined however the run ends, because tasks read the stack of the thread that made it. poll may not return:
 * Python ends (pthread_exit) the daemon threads that call it during exit. poll may also return in the child of a fork,
 * where the workers never existed.
 *
 * Work comes as n tasks. Threads take the next task from a counter, so which thread runs which task is random and must
 * not matter: tasks write disjoint memory. A task that was taken is run, so another may wait for it (flow.c). The
 * caller's thread works too; only it calls poll, about twenty times a second, between its tasks and while it waits. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "../vm.h"

enum { STACK_BYTES = 512 << 10, POLL_MS = 50 };

struct vm_pool {
    pthread_mutex_t lock;
    pthread_cond_t work, idle;
    unsigned threads, started, busy; /* busy: workers still in this batch */
    pid_t process;                   /* the process of the workers */
    size_t batch;                    /* counts calls of each(); a worker joins a batch it has not seen */
    bool quit;
    clockid_t clock;  /* times the wait for idle */
    atomic_bool stop; /* the run is cancelled */

    vm_task fn;
    const void *job;
    size_t tasks;
    atomic_size_t next, done;

    vm_poll poll;
    void *poll_context;
    size_t rows_before, rows_batch, rows_total;
    double polled;
    pthread_t thread[];
};

double vm_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void poll_now(vm_pool *p) {
    double t = vm_now();
    if (!p->poll || atomic_load(&p->stop) || t - p->polled < POLL_MS * 1e-3) return; /* a stopped run needs no poll */
    p->polled = t;
    size_t part = p->tasks ? (size_t)((double)p->rows_batch * (double)atomic_load(&p->done) / (double)p->tasks) : 0;
    if (p->poll(p->poll_context, p->rows_before + part, p->rows_total)) atomic_store(&p->stop, true);
}

static bool forked(const vm_pool *p) { return p->threads > 1 && p->process != getpid(); }

static void take_tasks(vm_pool *p, unsigned thread) {
    for (size_t i; !atomic_load(&p->stop) && (i = atomic_fetch_add(&p->next, 1)) < p->tasks;) {
        p->fn(p->job, i, thread);
        atomic_fetch_add(&p->done, 1);
        if (thread == 0) poll_now(p);
        if (thread == 0 && forked(p)) return; /* a task may wait for another thread's */
    }
}

static void *worker(void *arg) {
    vm_pool *p = arg;
    pthread_mutex_lock(&p->lock);
    unsigned self = ++p->started;
    for (size_t seen = 0;;) {
        while (!p->quit && p->batch == seen) pthread_cond_wait(&p->work, &p->lock);
        if (p->quit) break;
        seen = p->batch;
        pthread_mutex_unlock(&p->lock);
        take_tasks(p, self);
        pthread_mutex_lock(&p->lock);
        if (--p->busy == 0) pthread_cond_signal(&p->idle);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* Makes the condition, timed by the monotonic clock if the system allows. Returns: the clock used. */
static clockid_t open_idle(pthread_cond_t *idle) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
#ifdef __APPLE__ /* macOS has no pthread_condattr_setclock */
    const clockid_t clock = CLOCK_REALTIME;
#else
    const clockid_t clock = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC) ? CLOCK_REALTIME : CLOCK_MONOTONIC;
#endif
    pthread_cond_init(idle, &attr);
    pthread_condattr_destroy(&attr);
    return clock;
}

size_t vm_pool_bytes(unsigned threads) { return sizeof(vm_pool) + threads * sizeof(pthread_t); }

vm_status vm_pool_open(vm_pool *p, unsigned threads, size_t rows_total, vm_poll poll, void *poll_context) {
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    p->clock = open_idle(&p->idle);
    p->process = getpid();
    p->rows_total = rows_total;
    p->poll = poll;
    p->poll_context = poll_context;
    pthread_attr_t thread_attr;
    pthread_attr_init(&thread_attr);
    pthread_attr_setstacksize(&thread_attr, STACK_BYTES);
    int refused = 0;
    for (p->threads = 1; p->threads < threads && !refused; p->threads += !refused)
        refused = pthread_create(&p->thread[p->threads], &thread_attr, worker, p);
    pthread_attr_destroy(&thread_attr);
    if (!refused) return VM_OK;
    unsigned got = p->threads;
    vm_pool_close(p);
    return vm_fail(VM_ENOMEM, "threads: expected %u, the system gave %u (set VAEMEM_THREADS)", threads, got);
}

void vm_pool_close(vm_pool *p) {
    if (forked(p)) return;
    pthread_mutex_lock(&p->lock);
    p->quit = true;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (unsigned i = 1; i < p->threads; i++) pthread_join(p->thread[i], NULL);
    pthread_cond_destroy(&p->work);
    pthread_cond_destroy(&p->idle);
    pthread_mutex_destroy(&p->lock);
}

/* The caller's part of a batch: runs tasks, then waits for the workers. */
static void work(vm_pool *p) {
    take_tasks(p, 0);
    if (forked(p)) return;
    pthread_mutex_lock(&p->lock);
    while (p->busy) {
        struct timespec until;
        clock_gettime(p->clock, &until);
        until.tv_nsec += POLL_MS * 1000000L;
        if (until.tv_nsec >= 1000000000L) until.tv_sec++, until.tv_nsec -= 1000000000L;
        pthread_cond_timedwait(&p->idle, &p->lock, &until);
        pthread_mutex_unlock(&p->lock);
        poll_now(p);
        if (forked(p)) return;
        pthread_mutex_lock(&p->lock);
    }
    pthread_mutex_unlock(&p->lock);
}

/* Cleans up if poll ends this thread. */
static void abandon(void *pool) {
    vm_pool *p = pool;
    atomic_store(&p->stop, true);
    vm_pool_close(p);
}

vm_status vm_pool_each(void *pool, size_t n, size_t rows, vm_task fn, const void *job) {
    vm_pool *p = pool;
    pthread_mutex_lock(&p->lock);
    p->fn = fn;
    p->job = job;
    p->tasks = n;
    p->rows_batch = rows;
    atomic_store(&p->next, 0);
    atomic_store(&p->done, 0);
    p->busy = p->threads - 1;
    p->batch++;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);

    pthread_cleanup_push(abandon, p);
    work(p);
    pthread_cleanup_pop(0);
    if (forked(p)) return vm_fail(VM_ECANCELLED, "the run was cancelled: its threads stayed behind in a fork");
    p->rows_before += rows;
    if (atomic_load(&p->stop)) return vm_fail(VM_ECANCELLED, "the run was cancelled");
    return VM_OK;
}
