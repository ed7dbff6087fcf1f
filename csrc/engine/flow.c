/* Runs a round of a chain on a CPU: all its tasks as one batch, each as soon as its rows are there. No thread waits for
 * the end of a step.
 *
 * Threads take the tasks in the order of the schedule (chain.c). A task waits until
 *
 *   - the rows that it reads are done;
 *   - nobody still reads the rows that its own rows replace, in a ring or in the memory of a tensor that ends here;
 *   - so few rows of its pass are under way that their sums for a norm have different places.
 *
 * The plan has room for whole steps one after another. So once all earlier steps are done, every task of a step may
 * begin: the threads never wait for each other in a circle. Memory is that of the plan. The sums of rows are merged in
 * the order of the rows. So the bits are those of the steps. */
#include <pthread.h>
#include <unistd.h>

#include "plan.h"

/* Where a thread is: a row of tiles of a stage. */
typedef struct place {
    size_t stage, row;
} place;

enum { NOWHERE = VM_CHAIN };

typedef struct flow {
    pthread_mutex_t lock;
    pthread_cond_t moved; /* rows are done */
    const vm_plan *plan;
    const vm_chain *chain;
    const vm_tasks *tasks;
    size_t stages;
    vm_stage step[VM_CHAIN]; /* as far as tasks were taken: the current step */
    vm_stage done[VM_CHAIN]; /* as far as all rows are done and merged */
    size_t turn, taken;      /* stages of this step whose tasks were all taken; tasks of the next that were */
    place *at;               /* of each thread */
    vm_status status;
} flow;

/* Returns: the next task's stage; *task: which of the stage's. */
static size_t next_task(flow *f, size_t *task) {
    for (;; f->turn++, f->taken = 0) {
        if (f->turn == f->stages) {
            vm_chain_step(f->step, f->stages);
            f->turn = 0;
        }
        const vm_stage *s = &f->step[f->turn];
        if (f->taken == s->now * s->cut.columns) continue;
        *task = s->done * s->cut.columns + f->taken++;
        return f->turn;
    }
}

/* Returns: the first row of stage i's tensor that is still read or being made. */
static size_t kept_from(const flow *f, size_t i) {
    size_t row = SIZE_MAX;
    for (size_t j = i + 1; j < f->stages; j++) {
        const vm_stage *s = &f->done[j];
        if (!s->active) continue;
        if (s->x == (int)i) row = VM_MIN(row, vm_stage_from(s, s->done));
        if (s->add == (int)i) row = VM_MIN(row, vm_stage_made(s, s->done));
    }
    return row < SIZE_MAX ? row : vm_stage_made(&f->done[i], f->done[i].done);
}

/* Returns: whether stage i's rows up to `made` lie over no row that is still read. */
static bool has_room(const flow *f, size_t i, size_t made) {
    const int node = f->chain->first + (int)i;
    const vm_step *step = &f->plan->step[node];
    if (step->y == VM_NONE) return true;
    const vm_piece *y = &f->plan->piece[step->y];
    if (y->ring != SIZE_MAX) return made <= VM_MIN(kept_from(f, i), made) + y->ring;
    const size_t end = y->offset + made * vm_plan_pitch_bytes(f->plan, node);
    for (size_t p = 0; p < f->plan->pieces; p++) {
        const vm_piece *source = &f->plan->piece[p];
        if (source->heir != step->y || &f->plan->chain[source->last] != f->chain) continue;
        const bool apart = end <= source->offset || y->offset >= source->offset + source->bytes;
        if (!apart && end > source->offset + vm_plan_read_from(f->plan, f->chain, f->done, f->stages, (int)p))
            return false;
    }
    return true;
}

static bool may_begin(const flow *f, size_t i, size_t row) {
    const vm_stage *s = &f->done[i];
    return row < s->done + s->most && vm_stage_ready(f->done, s, row) && has_room(f, i, vm_stage_made(s, row + 1));
}

/* Merges the rows of a stage that are done. */
static void move_on(flow *f, size_t i) {
    const vm_stage *step = &f->step[i];
    const vm_tasks *tasks = &f->tasks[i];
    size_t end = step->done; /* the first row with tasks that are not done */
    if (i <= f->turn) end += i < f->turn ? step->now : f->taken / step->cut.columns;
    for (unsigned t = 0; t < f->plan->request.limits.threads; t++)
        if (f->at[t].stage == i) end = VM_MIN(end, f->at[t].row);
    const size_t from = f->done[i].done;
    if (end == from) return;
    if (tasks->rows && !f->status) f->status = tasks->rows(tasks, from, end - from);
    f->done[i].done = end;
    pthread_cond_broadcast(&f->moved);
}

static void flow_task(const void *job, size_t unused, unsigned thread) {
    flow *f = *(flow *const *)job;
    size_t task;
    (void)unused;
    pthread_mutex_lock(&f->lock);
    const size_t i = next_task(f, &task), row = task / f->done[i].cut.columns;
    f->at[thread] = (place){i, row};
    while (!may_begin(f, i, row)) pthread_cond_wait(&f->moved, &f->lock);
    pthread_mutex_unlock(&f->lock);
    f->tasks[i].fn(f->tasks[i].job, task, thread);
    pthread_mutex_lock(&f->lock);
    f->at[thread].stage = NOWHERE;
    move_on(f, i);
    pthread_mutex_unlock(&f->lock);
}

/* Fills f for a round whose stages are `stage`. Returns: how many tasks it has; *rows: of progress. */
static size_t begin(flow *f, const vm_stage *stage, size_t *rows) {
    size_t tasks = 0;
    *rows = f->turn = f->taken = 0;
    for (size_t i = 0; i < f->stages; i++) {
        f->step[i] = f->done[i] = stage[i];
        if (!stage[i].active) continue;
        tasks += stage[i].cut.rows * stage[i].cut.columns;
        *rows += stage[i].y_rows;
    }
    for (unsigned t = 0; t < f->plan->request.limits.threads; t++) f->at[t].stage = NOWHERE;
    vm_chain_step(f->step, f->stages);
    return tasks;
}

vm_status vm_flow_run(const vm_plan *plan, const vm_chain *chain, const vm_stage *stage, const vm_tasks *tasks,
                      size_t stages, const vm_exec *exec) {
    const pid_t process = getpid();
    place at[plan->request.limits.threads];
    size_t rows;
    flow f = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, plan, chain, tasks, stages, .at = at};
    const size_t n = begin(&f, stage, &rows);
    const vm_status s = exec->each(exec->pool, n, rows, flow_task, &(flow *){&f});
    if (getpid() != process) return s; /* in the child of a fork the lock may be held by a thread that never existed */
    pthread_cond_destroy(&f.moved);
    pthread_mutex_destroy(&f.lock);
    return s ? s : f.status;
}
