/* A move on any CPU: numbers of x to other channels and pixels of y, single or as means of several (vm_move).
 *
 *   prepared: job | scale, shift, sums
 *   scratch:  thread 0: x tile, a row of y | thread 1 ...
 *
 * A task loads a tile's input into the thread's scratch as floats, then makes its output from there, one row of one
 * channel block at a time. The whole input has been read by then: y may take x's memory if neither is larger. Means add
 * up in the order of their numbers. Memory bandwidth limits it. */
#include <string.h>

#include "cpu.h"

enum { TILE_WIDTH = 64 /* pixels */ };

typedef struct job {
    vm_work work;
    vm_grid g;
    vm_cpu cpu; /* of this pass: moves floats, whatever products use */
} job;

typedef struct layout {
    size_t work, prepared, y, scratch; /* bytes */
    size_t row, plane;                 /* floats of the x tile */
} layout;

static vm_grid make_grid(const vm_pass *p) {
    const size_t side = p->move.side, cell = p->up ? side : 1;
    vm_grid g = vm_grid_of(p, cell, cell, 1);
    g.step_h = g.step_w = p->up ? 1 : side;
    g.overlap = 0;
    const size_t columns = (p->y.w + TILE_WIDTH - 1) / TILE_WIDTH;
    vm_grid_cut(&g, 1, (g.width + columns - 1) / columns, 1);
    return g;
}

static layout make_layout(const vm_pass *p, const vm_grid *g, size_t at_once) {
    layout l = {.row = g->input_w * VM_BLOCK, .plane = g->input_f * g->input_h * g->input_w * VM_BLOCK};
    vm_put_bytes(&l.prepared, sizeof(job), VM_ALIGN);
    l.work = vm_put_bytes(&l.prepared, vm_work_bytes(p, g, at_once), VM_ALIGN);
    vm_put_bytes(&l.scratch, VM_PRODUCT(VM_BLOCKS(p->x.c), l.plane, sizeof(float)), VM_ALIGN);
    l.y = vm_put_bytes(&l.scratch, VM_PRODUCT(g->tile_w, g->cell_w, VM_BLOCK, sizeof(float)), VM_ALIGN);
    return l;
}

/* Makes n numbers of y, VM_BLOCK apart like those of x; adds numbers of x `step` pixels apart to them. */
static void add_up(float *y, const float *x, size_t step, size_t apart, size_t n, float share) {
    for (size_t i = 0; i < n; i++) y[i * apart * VM_BLOCK] += x[i * step * VM_BLOCK] * share;
}

/* Makes row `row` of the cells of a channel block of y from the x tile. frame: which of a channel's it is. */
static void make_row(const job *j, const layout *l, const float *x, float *y, size_t block, size_t frame, size_t row,
                     size_t cells) {
    const vm_pass *p = j->work.pass;
    const bool down = p->stride == 2, larger = p->up || (!down && p->y.c > p->x.c);
    const size_t share = vm_move_share(p->move, p->x.c, p->y.c, p->up, down), wide = j->g.cell_w;
    memset(y, 0, cells * wide * VM_BLOCK * sizeof *y);
    for (size_t lane = 0, o = block * VM_BLOCK; lane < VM_BLOCK && o < p->y.c; lane++, o++) {
        for (size_t s = 0; larger && s < wide; s++) {
            const size_t cycle = p->move.in_turn ? p->x.c / (p->move.frames * wide * wide) : p->y.c;
            const size_t at = p->up ? vm_move_at(p->move, p->y.c, o % cycle, frame, row, s) : o;
            const size_t c = VM_MIN(at / share, p->x.c - 1); /* if x runs out of channels, its last one is repeated */
            add_up(y + s * VM_BLOCK + lane, x + c / VM_BLOCK * l->plane + c % VM_BLOCK, 1, wide, cells, 1);
        }
        for (size_t i = 0; !larger && i < share; i++) {
            size_t c = o * share + i, r = 0, s = 0;
            const size_t of = down ? vm_move_from(p->move, p->x.c, c, &c, &r, &s) : 0;
            if (down && p->time == VM_TIME_SAME && of != frame) continue; /* zero */
            r += p->time == VM_TIME_SAME ? 0 : of * j->g.input_h;
            const float *from = x + c / VM_BLOCK * l->plane + r * l->row + s * VM_BLOCK + c % VM_BLOCK;
            add_up(y + lane, from, down ? p->move.side : 1, 1, cells, 1 / (float)share);
        }
    }
}

/* Makes a channel block of frame `to` of a tile, which is the channels' frame `frame`. */
static void make_frame(const job *j, const layout *l, const float *x, float *y, const vm_box *out, size_t block,
                       size_t frame, size_t to) {
    for (size_t row = 0; row < out->rows; row++) {
        make_row(j, l, x, y, block, frame, row, (out->width + j->g.cell_w - 1) / j->g.cell_w);
        vm_store_row(&j->work, y, block, to, (size_t)out->top + row, (size_t)out->left, out->width);
    }
}

static void move_tile(const void *context, size_t task, unsigned thread) {
    const job *j = context;
    const vm_pass *p = j->work.pass;
    const layout l = make_layout(p, &j->g, j->work.at.manner.at_once);
    char *own = (char *)j->work.at.scratch + thread * j->work.at.scratch_each;
    float *x = (float *)own, *y = (float *)(own + l.y);
    const vm_tile tile = vm_grid_tile(&j->g, task);
    const vm_box input = vm_tile_input(&j->g, &tile), output = vm_tile_output(&j->g, &tile);
    vm_load_box(&j->work, &input, NULL, x, l.plane, j->g.input_h * l.row, l.row);
    const size_t first = (size_t)output.first, all = p->move.frames;
    for (size_t block = 0; block < VM_BLOCKS(p->y.c); block++) {
        if (p->time == VM_TIME_DOUBLED && first) make_frame(j, &l, x, y, &output, block, 0, 2 * first - 1);
        make_frame(j, &l, x, y, &output, block, all - 1, p->time == VM_TIME_DOUBLED ? 2 * first : first);
        if (p->stats) vm_measure_box(&j->work, &output, task, block);
    }
}

static vm_cut move_cut(const vm_cpu *cpu, const vm_pass *pass) {
    (void)cpu;
    const vm_grid g = make_grid(pass);
    return vm_grid_rows(&g);
}

static vm_needs move_needs(const vm_cpu *cpu, const vm_pass *pass, vm_manner manner) {
    (void)cpu;
    const vm_grid g = make_grid(pass);
    const layout l = make_layout(pass, &g, manner.at_once);
    return (vm_needs){.prepared = l.prepared, .scratch = l.scratch};
}

static vm_status move_prepare(const vm_cpu *cpu, const vm_pass *pass, const vm_operands *at, const vm_exec *exec,
                              vm_tasks *out) {
    (void)exec;
    job *j = at->prepared;
    *j = (job){.g = make_grid(pass), .cpu = vm_with_floats(cpu)};
    const layout l = make_layout(pass, &j->g, at->manner.at_once);
    j->work = vm_work_begin(&j->cpu, pass, at, &j->g, (char *)at->prepared + l.work);
    *out = (vm_tasks){move_tile, j, pass->stats ? vm_merge_rows : NULL};
    return VM_OK;
}

const vm_method vm_moves = {move_cut, move_needs, move_prepare};
